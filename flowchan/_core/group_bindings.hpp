#pragma once

#include <nanobind/nanobind.h>

namespace flowchan {

void bind_group(nanobind::module_& m);

}  // namespace flowchan
