# Replaces CMake's FindPython in a release, because the headers may not belong to the CPython that runs the
# build.
# tools/release/wheels.py passes RELEASE_PYTHON_VERSION and RELEASE_PYTHON_INCLUDE; scikit-build-core passes Python_EXECUTABLE.
set(Python_FOUND TRUE)
set(Python_INTERPRETER_ID Python)
set(Python_VERSION ${RELEASE_PYTHON_VERSION})
string(REGEX MATCH "^[0-9]+" Python_VERSION_MAJOR ${Python_VERSION})
string(REGEX MATCH "[0-9]+$" Python_VERSION_MINOR ${Python_VERSION})
set(Python_INCLUDE_DIRS ${RELEASE_PYTHON_INCLUDE})
if(NOT TARGET Python::Module)
  add_executable(Python::Interpreter IMPORTED)
  set_target_properties(Python::Interpreter PROPERTIES IMPORTED_LOCATION ${Python_EXECUTABLE})
  add_library(Python::Module INTERFACE IMPORTED)
  target_include_directories(Python::Module INTERFACE ${Python_INCLUDE_DIRS})
endif()
