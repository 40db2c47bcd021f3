#pragma once

#include <nanobind/nanobind.h>

namespace flowchan {

void bind_process(nanobind::module_& m);

}  // namespace flowchan
