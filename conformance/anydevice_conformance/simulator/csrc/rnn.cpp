#include "rnn.h"

namespace sim {
namespace {

Tensor with_bias(const Tensor& gates, const MaybeTensor& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

Tensor sigmoid_gradient(const Tensor& grad, const Tensor& y) { return grad * y * (1 - y); }

Tensor tanh_gradient(const Tensor& grad, const Tensor& y) { return grad * (1 - y * y); }

}  // namespace

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates,
                                             const Tensor& cx, const MaybeTensor& input_bias,
                                             const MaybeTensor& hidden_bias) {
  const auto gates =
      (with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias)).chunk(4, 1);
  const auto in = gates[0].sigmoid(), forget = gates[1].sigmoid(), cell = gates[2].tanh(),
             out = gates[3].sigmoid();
  auto cy = forget * cx + in * cell;
  auto hy = out * cy.tanh();
  return {hy, cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const MaybeTensor& grad_hy,
                                                      const MaybeTensor& grad_cy, const Tensor& cx,
                                                      const Tensor& cy, const Tensor& workspace,
                                                      bool has_bias) {
  const bool has_hy = grad_hy && grad_hy->defined(), has_cy = grad_cy && grad_cy->defined();
  if (!has_hy && !has_cy) return {};
  const auto gates = workspace.chunk(4, 1);
  const auto &in = gates[0], &forget = gates[1], &cell = gates[2], &out = gates[3];
  const auto tanh_cy = cy.tanh();
  const auto to_hy = has_hy ? *grad_hy : at::zeros_like(cy);
  auto to_cy = tanh_gradient(to_hy * out, tanh_cy);
  if (has_cy) to_cy = to_cy + *grad_cy;
  auto to_gates = at::cat({sigmoid_gradient(to_cy * cell, in), sigmoid_gradient(to_cy * cx, forget),
                           tanh_gradient(to_cy * in, cell), sigmoid_gradient(to_hy * tanh_cy, out)},
                          1);
  return {to_gates, to_cy * forget, has_bias ? to_gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates,
                                    const Tensor& hx, const MaybeTensor& input_bias,
                                    const MaybeTensor& hidden_bias) {
  const auto from_input = with_bias(input_gates, input_bias).chunk(3, 1);
  const auto from_hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const auto reset = (from_input[0] + from_hidden[0]).sigmoid();
  const auto update = (from_input[1] + from_hidden[1]).sigmoid();
  const auto fresh = (from_input[2] + reset * from_hidden[2]).tanh();
  auto hy = fresh + update * (hx - fresh);
  return {hy, at::cat({reset, update, fresh, hx, from_hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hy,
                                                                     const Tensor& workspace,
                                                                     bool has_bias) {
  const auto parts = workspace.chunk(5, 1);
  const auto &reset = parts[0], &update = parts[1], &fresh = parts[2], &hx = parts[3],
             &hidden = parts[4];
  const auto to_fresh = tanh_gradient(grad_hy * (1 - update), fresh);
  const auto to_update = sigmoid_gradient(grad_hy * (hx - fresh), update);
  const auto to_reset = sigmoid_gradient(to_fresh * hidden, reset);
  auto to_input = at::cat({to_reset, to_update, to_fresh}, 1);
  auto to_hidden = at::cat({to_reset, to_update, to_fresh * reset}, 1);
  if (!has_bias) return {to_input, to_hidden, grad_hy * update, Tensor(), Tensor()};
  return {to_input, to_hidden, grad_hy * update, to_input.sum(0), to_hidden.sum(0)};
}

}  // namespace sim
