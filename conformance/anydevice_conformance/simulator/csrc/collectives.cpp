// Collectives as hardware has them: queued, on a stream of their own, ordered with the current one.
//
// A collective takes its input when it is called, after what the current stream has queued: the
// input travels from a copy in host memory, on the carrier's threads, so that a rank makes progress
// whatever the others wait for. The result is written by a task on the collectives' stream: it is
// there when something waits for it, and not before. A failure of the carrier is that task's, and
// so is raised where the host next waits for the stream, as with hardware.
#include "collectives.h"

#include <ATen/core/ivalue.h>

#include <atomic>

#include "aliases.h"
#include "current.h"

namespace sim {
namespace {

using c10d::OpType;
using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;
using Tensors = std::vector<Tensor>;

constexpr double kStart_us = 20;  // what a collective costs before its first byte
constexpr int64_t kFirstStream = 64, kStreams = 32;

// Makes a stream current on its device for a scope.
class CurrentStream {
 public:
  CurrentStream(int device, int64_t id) : device_(device), before_(current_stream_id(device)) {
    set_current_stream_id(device, id);
  }
  ~CurrentStream() { set_current_stream_id(device_, before_); }

 private:
  int device_;
  int64_t before_;
};

// What went wrong with a collective, once it has run.
using Failure = std::shared_ptr<std::exception_ptr>;

// Has `waiting` wait for a recording; a failure is then its failure, too.
void wait_on_stream(const std::shared_ptr<Recording>& recording, SimStream* waiting, Lock& lock,
                    Failure failure = nullptr) {
  Task wait;
  wait.wait_for = recording;
  if (failure)
    wait.body = [failure] {
      if (*failure) std::rethrow_exception(*failure);
    };
  enqueue(lock, waiting, std::move(wait));
}

class SimWork final : public c10d::Work {
 public:
  SimWork(int rank, OpType type, int device, Works carried, std::shared_ptr<Recording> end,
          Tensors outputs, int64_t stream, Failure failure)
      : Work(rank, type),
        device_(device),
        carried_(std::move(carried)),
        end_(std::move(end)),
        outputs_(std::move(outputs)),
        failure_(std::move(failure)) {
    const CurrentStream on_it(device, stream);  // where the future records its events
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<Device>{device_at(device)});
    future_->markCompleted(c10::IValue(outputs_));
  }

  // Done on the device. The carrier's part may be done earlier; then the device's is a copy.
  bool isCompleted() override {
    for (auto& work : carried_)
      if (!work->isCompleted()) return false;
    Lock lock(runtime().mutex);
    wait_until(lock, end_->stream, end_->position);
    return true;
  }
  bool isSuccess() const override {
    for (auto& work : carried_)
      if (!work->isSuccess()) return false;
    return true;
  }
  std::exception_ptr exception() const override {
    for (auto& work : carried_)
      if (work->exception()) return work->exception();
    return nullptr;
  }
  // The current stream waits, and the host goes on; a barrier stops the host.
  bool wait(std::chrono::milliseconds) override {
    Lock lock(runtime().mutex);
    wait_on_stream(end_, current_stream(device_), lock, failure_);
    if (retrieveOpType() == OpType::BARRIER) host_sync(lock, end_->stream, end_->position);
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  // Known once the message is there: the host waits for it.
  int sourceRank() const override {
    Lock lock(runtime().mutex);
    host_sync(lock, end_->stream, end_->position);
    return carried_.at(0)->sourceRank();
  }

 private:
  int device_;
  Works carried_;
  std::shared_ptr<Recording> end_;
  Tensors outputs_;
  Failure failure_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// One collective on its way: what was taken, what the carrier does, where results go.
struct Carriage {
  int device;
  Works carried;
  std::vector<std::pair<Tensor, Tensor>> results;  // from host memory, to a simulated tensor
  std::vector<std::function<void()>> finish;       // before results are written
};

Tensor as_bytes(const Tensor& host) { return host.reshape({-1}).view(at::kByte); }

Tensor host_like(const Tensor& t) {
  return at::empty(t.sizes(), at::TensorOptions().dtype(t.scalar_type()).device(at::kCPU));
}

int device_of(const Tensors& tensors) {
  TORCH_CHECK(!tensors.empty(), "sim: a collective without a tensor");
  for (const auto& t : tensors)
    TORCH_CHECK(is_sim(t) && t.device() == tensors[0].device(),
                "sim: a collective needs tensors of one simulated device");
  return tensors[0].device().index();
}

class SimCollectives final : public c10d::Backend {
 public:
  explicit SimCollectives(c10::intrusive_ptr<c10d::Backend> carrier)
      : Backend(carrier->getRank(), carrier->getSize()), carrier_(std::move(carrier)) {}

  const std::string getBackendName() const override { return "simccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override { carrier_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  c10::intrusive_ptr<c10d::Work> broadcast(Tensors& tensors,
                                           const c10d::BroadcastOptions& opts) override {
    auto c = begin(tensors);
    for (const auto& t : tensors) {
      auto host = take(c, t);
      if (host.numel()) c.carried.push_back(call_broadcast(as_bytes(host), opts));
      if (opts.rootRank != rank_) c.results.emplace_back(host, t);
    }
    return end(std::move(c), OpType::BROADCAST, tensors);
  }

  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors,
                                           const c10d::AllreduceOptions& opts) override {
    auto c = begin(tensors);
    for (const auto& t : tensors) c.results.emplace_back(reduced(c, take(c, t), opts), t);
    return end(std::move(c), OpType::ALLREDUCE, tensors);
  }
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return allreduce(tensors, opts);
  }

  c10::intrusive_ptr<c10d::Work> reduce(Tensors& tensors,
                                        const c10d::ReduceOptions& opts) override {
    auto c = begin(tensors);
    for (const auto& t : tensors) {
      auto sum = reduced(c, take(c, t), all(opts));
      if (opts.rootRank == rank_) c.results.emplace_back(sum, t);
    }
    return end(std::move(c), OpType::REDUCE, tensors);
  }

  c10::intrusive_ptr<c10d::Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                           const c10d::AllgatherOptions& opts) override {
    auto c = begin(inputs);
    Tensors all;
    for (size_t i = 0; i < inputs.size(); i++) {
      auto pieces = gathered(c, take(c, inputs[i]), opts);
      TORCH_CHECK(outputs[i].size() == pieces.size(), "sim: allgather needs an output for each rank");
      for (size_t r = 0; r < pieces.size(); r++) give(c, pieces[r], outputs[i][r], all);
    }
    return end(std::move(c), OpType::ALLGATHER, all);
  }
  c10::intrusive_ptr<c10d::Work> allgather_coalesced(std::vector<Tensors>& outputs,
                                                     Tensors& inputs,
                                                     const c10d::AllgatherOptions& opts) override {
    return allgather(outputs, inputs, opts);
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(Tensor& output, Tensor& input,
                                                 const c10d::AllgatherOptions& opts) override {
    Tensors outputs{output}, inputs{input};
    return allgather_into_tensor_coalesced(outputs, inputs, opts);
  }
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    auto c = begin(inputs);
    for (size_t i = 0; i < inputs.size(); i++) {
      TORCH_CHECK(outputs[i].numel() == inputs[i].numel() * size_,
                  "sim: the output must be the input's size times the number of ranks");
      auto pieces = gathered(c, take(c, inputs[i]), opts);
      for (auto& piece : pieces) piece = piece.reshape({-1});
      // Put together when they have come: `cat` would read them now.
      auto whole = host_like(outputs[i]);
      c.finish.push_back([pieces, whole] {
        auto joined = whole.view({-1});
        at::cat_out(joined, pieces);
      });
      c.results.emplace_back(whole, outputs[i]);
    }
    return end(std::move(c), OpType::_ALLGATHER_BASE, outputs);
  }

  c10::intrusive_ptr<c10d::Work> gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                        const c10d::GatherOptions& opts) override {
    auto c = begin(inputs);
    Tensors all;
    auto pieces = gathered(c, take(c, inputs.at(0)), c10d::AllgatherOptions{opts.timeout});
    if (opts.rootRank == rank_)
      for (size_t r = 0; r < pieces.size(); r++) give(c, pieces[r], outputs.at(0).at(r), all);
    return end(std::move(c), OpType::GATHER, all);
  }

  c10::intrusive_ptr<c10d::Work> scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                         const c10d::ScatterOptions& opts) override {
    auto c = begin(outputs);
    auto host = host_like(outputs.at(0));
    if (host.numel()) {
      Tensors to{as_bytes(host)};
      std::vector<Tensors> from;
      if (opts.rootRank == rank_) {
        from.emplace_back();
        for (const auto& t : inputs.at(0)) from[0].push_back(as_bytes(take(c, t)));
      }
      c.carried.push_back(carrier_->scatter(to, from, opts));
    }
    c.results.emplace_back(host, outputs[0]);
    return end(std::move(c), OpType::SCATTER, outputs);
  }

  c10::intrusive_ptr<c10d::Work> reduce_scatter(std::vector<Tensor>& outputs,
                                                std::vector<Tensors>& inputs,
                                                const c10d::ReduceScatterOptions& opts) override {
    auto c = begin(outputs);
    for (size_t i = 0; i < outputs.size(); i++) {
      for (int r = 0; r < size_; r++) {
        auto sum = reduced(c, take(c, inputs[i].at(r)), all(opts));
        if (r == rank_) c.results.emplace_back(sum, outputs[i]);
      }
    }
    return end(std::move(c), OpType::REDUCE_SCATTER, outputs);
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    Tensors outputs{output}, inputs{input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, opts);
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
    auto c = begin(inputs);
    for (size_t i = 0; i < inputs.size(); i++) {
      const auto each = outputs[i].numel();
      TORCH_CHECK(inputs[i].numel() == each * size_,
                  "sim: the input must be the output's size times the number of ranks");
      auto sum = reduced(c, take(c, inputs[i]), all(opts)).reshape({-1});
      c.results.emplace_back(sum.narrow(0, rank_ * each, each).view(outputs[i].sizes()),
                             outputs[i]);
    }
    return end(std::move(c), OpType::_REDUCE_SCATTER_BASE, outputs);
  }

  c10::intrusive_ptr<c10d::Work> alltoall_base(Tensor& output, Tensor& input,
                                               std::vector<int64_t>& output_splits,
                                               std::vector<int64_t>& input_splits,
                                               const c10d::AllToAllOptions& opts) override {
    Tensors both{input, output}, outputs{output};
    auto c = begin(both);
    auto from = take(c, input), to = host_like(output);
    auto rows = [](const Tensor& t) {
      const auto count = t.dim() ? t.size(0) : 1;
      return t.numel() ? as_bytes(t).view({count, -1}) : at::empty({count, 0}, at::kByte);
    };
    auto sent = rows(from), received = rows(to);
    c.carried.push_back(
        carrier_->alltoall_base(received, sent, output_splits, input_splits, opts));
    c.results.emplace_back(to, output);
    return end(std::move(c), OpType::ALLTOALL_BASE, outputs);
  }
  c10::intrusive_ptr<c10d::Work> alltoall(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllToAllOptions& opts) override {
    auto c = begin(inputs);
    Tensors from;
    std::vector<int64_t> sizes_in, sizes_out;
    for (const auto& t : inputs) {
      from.push_back(as_bytes(take(c, t)));
      sizes_in.push_back(from.back().numel());
    }
    int64_t total = 0;
    for (const auto& t : outputs) {
      sizes_out.push_back(t.numel() * t.element_size());
      total += sizes_out.back();
    }
    auto sent = at::cat(from), received = at::empty({total}, at::kByte);
    auto counts = sizes_out;  // the carrier may take what it is given
    c.carried.push_back(carrier_->alltoall_base(received, sent, counts, sizes_in, opts));
    int64_t start = 0;
    for (size_t r = 0; r < outputs.size(); r++) {
      auto host = host_like(outputs[r]);
      auto piece = received.narrow(0, start, sizes_out[r]);
      c.finish.push_back([host, piece] { as_bytes(host).copy_(piece); });
      c.results.emplace_back(host, outputs[r]);
      start += sizes_out[r];
    }
    return end(std::move(c), OpType::ALLTOALL, outputs);
  }

  c10::intrusive_ptr<c10d::Work> send(Tensors& tensors, int to, int tag) override {
    auto c = begin(tensors);
    for (const auto& t : tensors) {
      Tensors host{as_bytes(take(c, t))};
      c.carried.push_back(carrier_->send(host, to, tag));
    }
    return end(std::move(c), OpType::SEND, tensors);
  }
  c10::intrusive_ptr<c10d::Work> recv(Tensors& tensors, int from, int tag) override {
    return receive(tensors, OpType::RECV,
                   [&](Tensors& host) { return carrier_->recv(host, from, tag); });
  }
  c10::intrusive_ptr<c10d::Work> recvAnysource(Tensors& tensors, int tag) override {
    return receive(tensors, OpType::RECVANYSOURCE,
                   [&](Tensors& host) { return carrier_->recvAnysource(host, tag); });
  }

  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& opts) override {
    int device = current_device();
    if (!opts.device_ids.empty()) device = static_cast<int>(opts.device_ids[0]);
    if (opts.device && opts.device->has_index()) device = opts.device->index();
    check_device(device);
    Carriage c{device};
    settle(device);
    c.carried.push_back(carrier_->barrier(opts));
    return end(std::move(c), OpType::BARRIER, {});
  }

 private:
  template <typename Options>
  static c10d::AllreduceOptions all(const Options& opts) {
    c10d::AllreduceOptions result;
    result.reduceOp = opts.reduceOp;
    result.timeout = opts.timeout;
    return result;
  }

  // Lets the current stream run what it has queued, as it could have by now. Not counted.
  static void settle(int device) {
    Lock lock(runtime().mutex);
    auto* stream = current_stream(device);
    wait_until(lock, stream, stream->submitted);
  }

  Carriage begin(const Tensors& tensors) {
    Carriage c{device_of(tensors)};
    settle(c.device);
    return c;
  }

  // A copy of a simulated tensor in host memory.
  Tensor take(const Carriage& c, const Tensor& t) {
    TORCH_CHECK(is_sim(t) && t.device().index() == c.device,
                "sim: a collective needs tensors of one simulated device");
    return cpu_alias(t).clone(at::MemoryFormat::Contiguous);
  }

  static void give(Carriage& c, const Tensor& host, const Tensor& output, Tensors& outputs) {
    c.results.emplace_back(host.view(output.sizes()), output);
    outputs.push_back(output);
  }

  c10::intrusive_ptr<c10d::Work> call_broadcast(Tensor bytes, const c10d::BroadcastOptions& opts) {
    Tensors one{std::move(bytes)};
    return carrier_->broadcast(one, opts);
  }

  // The reduction of a host tensor, in place, when the carrier is done.
  Tensor reduced(Carriage& c, Tensor host, c10d::AllreduceOptions opts) {
    const bool mean = opts.reduceOp == c10d::ReduceOp::AVG;
    if (mean) opts.reduceOp = c10d::ReduceOp::SUM;
    if (host.numel()) {
      Tensors one{host};
      c.carried.push_back(carrier_->allreduce(one, opts));
    }
    if (mean) {
      const int size = size_;
      c.finish.push_back([host, size]() mutable {
        at::isIntegralType(host.scalar_type(), true) ? host.floor_divide_(size) : host.div_(size);
      });
    }
    return host;
  }

  // What each rank sends, when the carrier is done.
  Tensors gathered(Carriage& c, const Tensor& host, const c10d::AllgatherOptions& opts) {
    Tensors pieces, bytes;
    for (int r = 0; r < size_; r++) {
      pieces.push_back(host_like(host));
      bytes.push_back(as_bytes(pieces.back()));
    }
    if (host.numel()) {
      std::vector<Tensors> outputs{bytes};
      Tensors inputs{as_bytes(host)};
      c.carried.push_back(carrier_->allgather(outputs, inputs, opts));
    }
    return pieces;
  }

  template <typename Call>
  c10::intrusive_ptr<c10d::Work> receive(Tensors& tensors, OpType type, Call call) {
    auto c = begin(tensors);
    for (const auto& t : tensors) {
      auto host = host_like(t);
      Tensors one{as_bytes(host)};
      c.carried.push_back(call(one));
      c.results.emplace_back(host, t);
    }
    return end(std::move(c), type, tensors);
  }

  // This group's stream on a device, beyond those that programs take turns on.
  int64_t stream_id(int device) {
    static std::atomic<int64_t> next{0};
    if (!streams_[device]) streams_[device] = kFirstStream + next++ % kStreams;
    return streams_[device];
  }

  // Queues the writing of results on the collectives' stream.
  c10::intrusive_ptr<c10d::Work> end(Carriage c, OpType type, const Tensors& outputs) {
    sequence_++;
    size_t bytes = 0;
    for (auto& [host, output] : c.results) {
      TORCH_CHECK(is_sim(output) && output.device().index() == c.device,
                  "sim: a collective needs tensors of one simulated device");
      bytes += host.numel() * host.element_size();
    }
    Task task;
    task.kind = "collective";
    task.bytes = bytes;
    task.cost_us = kStart_us + bytes / config().p2p;
    task.stamp = std::make_shared<Recording>();
    auto recording = task.stamp;
    auto carried = c.carried;
    auto failure = std::make_shared<std::exception_ptr>();
    task.body = [c, failure] {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      try {
        for (auto& work : c.carried) work->wait();
        for (auto& finish : c.finish) finish();
        for (auto& [host, output] : c.results) cpu_alias(output).copy_(host);
      } catch (...) {
        *failure = std::current_exception();
        throw;
      }
    };
    Lock lock(runtime().mutex);
    const auto id = stream_id(c.device);
    auto* stream = stream_at(c.device, id);
    auto before = std::make_shared<Recording>();
    Task mark;
    mark.stamp = before;
    enqueue(lock, current_stream(c.device), std::move(mark));
    wait_on_stream(before, stream, lock);
    enqueue(lock, stream, std::move(task));
    lock.unlock();
    return c10::make_intrusive<SimWork>(rank_, type, c.device, std::move(carried), recording,
                                        outputs, id, failure);
  }

  c10::intrusive_ptr<c10d::Backend> carrier_;
  int64_t streams_[kMaxDevices] = {};
  uint64_t sequence_ = 0;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_collectives(c10::intrusive_ptr<c10d::Backend> carrier) {
  return c10::make_intrusive<SimCollectives>(std::move(carrier));
}

}  // namespace sim
