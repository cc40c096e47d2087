// The fused cells of LSTM and GRU: torch calls them on PrivateUse1 as on CUDA, and the CPU has
// none.
#pragma once

#include <optional>
#include <tuple>

#include "config.h"

namespace sim {

using MaybeTensor = std::optional<Tensor>;

// hy, cy, workspace (the four gates after their activations).
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates,
                                             const Tensor& cx, const MaybeTensor& input_bias,
                                             const MaybeTensor& hidden_bias);
// Gradients of the gates, of cx, of a bias.
std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const MaybeTensor& grad_hy,
                                                      const MaybeTensor& grad_cy, const Tensor& cx,
                                                      const Tensor& cy, const Tensor& workspace,
                                                      bool has_bias);
// hy, workspace (reset, update and new gate, hx, the new gate's hidden part).
std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates,
                                    const Tensor& hx, const MaybeTensor& input_bias,
                                    const MaybeTensor& hidden_bias);
// Gradients of the input gates, hidden gates, hx, input bias, hidden bias.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hy,
                                                                     const Tensor& workspace,
                                                                     bool has_bias);

}  // namespace sim
