// Copies between host and device, and between devices: priced, counted, queued.
#pragma once

#include "config.h"

namespace sim {

// aten::_copy_from: `to` takes the values of `from`, whatever their dtypes and strides.
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking);
Tensor copy_from_and_resize(const Tensor& from, const Tensor& to);

}  // namespace sim
