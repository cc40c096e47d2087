#include "op_info.h"

#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>

namespace sim {
namespace {

bool returns_tensors(const c10::Argument& result) {
  const auto& type = result.type();
  if (type->kind() == c10::TypeKind::TensorType) return true;
  return type->kind() == c10::TypeKind::ListType &&
         type->castRaw<c10::ListType>()->getElementType()->kind() == c10::TypeKind::TensorType;
}

// The argument that a written return aliases, or -1.
int aliased_argument(const c10::FunctionSchema& schema, const c10::AliasInfo& result) {
  int which = -1;
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias && alias->isWrite() && alias->beforeSets() == result.beforeSets())
      which = static_cast<int>(i);
  }
  return which;
}

// Operators whose Meta kernel and CPU kernel disagree on the outputs' shapes.
bool meta_disagrees(const std::string& name) {
  static const std::set<std::string> names{
      "aten::native_batch_norm", "aten::_native_batch_norm_legit", "aten::_embedding_bag",
      "aten::_native_batch_norm_legit_no_training", "aten::_embedding_bag_forward_only"};
  return names.count(name) > 0;
}

void read_arguments(const c10::FunctionSchema& schema, OpInfo& info) {
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    const auto& argument = schema.arguments()[i];
    info.writes.push_back(argument.alias_info() && argument.alias_info()->isWrite());
    auto type = argument.type();
    if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    if (type->kind() == c10::TypeKind::GeneratorType) info.generator_argument = static_cast<int>(i);
    if (argument.name() == "pin_memory") info.pin_argument = static_cast<int>(i);
  }
}

OpInfo make_info(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  OpInfo info;
  read_arguments(schema, info);
  bool all_alias = true, all_tensors = true;
  for (const auto& result : schema.returns()) {
    all_tensors &= returns_tensors(result);
    int which = -1;
    if (const auto* alias = result.alias_info()) {
      if (alias->isWrite()) {
        which = aliased_argument(schema, *alias);
      } else {
        info.metadata_only = true;
      }
    }
    all_alias &= which >= 0;
    info.returned_argument.push_back(which);
  }
  info.outputs_are_arguments = all_alias;
  info.metadata_only |= name == "aten::set_";
  info.takes_cpu_indices = name.find("index") != std::string::npos && name != "aten::index_select";
  info.draws_from_global =
      info.generator_argument < 0 && op.hasTag(at::Tag::nondeterministic_seeded);
  info.reads_back = op.hasTag(at::Tag::dynamic_output_shape) ||
                    op.hasTag(at::Tag::data_dependent_output) || !all_tensors;
  info.may_queue = !info.reads_back && !info.draws_from_global && !meta_disagrees(name);
  return info;
}

}  // namespace

const OpInfo& op_info(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static auto* known = new std::unordered_map<const void*, std::unique_ptr<OpInfo>>;
  std::lock_guard<std::mutex> guard(mutex);
  auto& slot = (*known)[&op.schema()];
  if (!slot) slot = std::make_unique<OpInfo>(make_info(op));
  return *slot;
}

}  // namespace sim
