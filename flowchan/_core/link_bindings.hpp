#pragma once

#include <nanobind/nanobind.h>

namespace flowchan {

void bind_link(nanobind::module_& m);

}  // namespace flowchan
