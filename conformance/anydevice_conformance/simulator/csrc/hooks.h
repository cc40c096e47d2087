#pragma once

namespace sim {

// Once a process.
void register_hooks();

}  // namespace sim
