// What an operator's schema says of it, once an operator; and walks over boxed arguments.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <vector>

#include "config.h"

namespace sim {

struct OpInfo {
  bool metadata_only = false;          // a view: no memory is read or written
  bool outputs_are_arguments = false;  // in-place or out=
  bool may_queue = true;               // outputs can be known before the kernel has run
  bool reads_back = false;             // the host needs the result: a real device waits here, too
  bool takes_cpu_indices = false;
  bool draws_from_global = false;  // random, and takes no generator
  int generator_argument = -1, pin_argument = -1;
  std::vector<bool> writes;            // for each argument
  std::vector<int> returned_argument;  // for each return: the argument that it is, or -1
};

const OpInfo& op_info(const c10::OperatorHandle& op);

// Calls f(tensor) for each defined tensor in an argument.
template <class F>
void for_each_tensor(const c10::IValue& value, F f) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) f(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& t : value.toTensorVector())
      if (t.defined()) f(t);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<Tensor>& t : value.toOptionalTensorVector())
      if (t && t->defined()) f(*t);
  }
}

// The same argument with f(tensor) in place of each defined tensor.
template <class F>
c10::IValue map_tensors(const c10::IValue& value, F f) {
  if (value.isTensor()) {
    const auto& t = value.toTensor();
    return t.defined() ? c10::IValue(f(t)) : value;
  }
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : value.toTensorVector()) list.push_back(t.defined() ? f(t) : t);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& t : value.toOptionalTensorVector())
      list.push_back(t && t->defined() ? std::optional<Tensor>(f(*t)) : t);
    return list;
  }
  return value;
}

}  // namespace sim
