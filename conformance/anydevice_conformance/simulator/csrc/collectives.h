// torch.distributed on simulated devices: what another backend carries between hosts.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "config.h"

namespace sim {

// A backend for tensors of simulated devices. `carrier` moves bytes of host memory between ranks.
c10::intrusive_ptr<c10d::Backend> make_collectives(c10::intrusive_ptr<c10d::Backend> carrier);

}  // namespace sim
