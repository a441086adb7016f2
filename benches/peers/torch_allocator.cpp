// PyTorch's caching allocator through C++, as a side of `cargo bench --bench memory`. It waits for lines `order number` on
// its standard input and answers each with one number. `benches/run-gpu.sh` builds it; `GPU_POOL_TORCH` names it to the
// bench.
//
//   pair:BYTES:THREADS n     n allocations and frees on each of THREADS devices at once: nanoseconds a pair, the mean of threads
//   remote:BYTES:THREADS n   n blocks of device 0 for each of THREADS threads, which free them at once: nanoseconds a free
//   limit bytes              from the next trace on, the most that may be taken from device 0 (0: everything)
//   load:PATH devices        forgets what was before, gives memory back, reads a trace (benches/memory/trace.rs)
//   first n                  the next n steps of its first part, on every device: how many requests were refused
//   again n                  its second part, n times on every device at once: nanoseconds an operation, the mean of devices
//   calls 0                  calls of cudaMalloc and cudaFree (and their like) for device 0 so far
//   reserved 0, peak_reserved 0, peak_allocated 0      bytes, of device 0, since the trace was loaded
//
// One host thread per device, each with the device's default stream and its own blocks, as gpu-pool's device threads are.

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iostream>
#include <memory>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace allocator = c10::cuda::CUDACachingAllocator;
using Clock = std::chrono::steady_clock;

struct Step {
  uint64_t slot, bytes;
};

struct Trace {
  uint64_t slots = 0, operations = 1;
  std::vector<Step> first, again;
  size_t next = 0;  // of `first`
};

// All threads meet before they begin.
struct Start {
  explicit Start(int parties) : missing(parties) {}
  void wait() {
    missing.fetch_sub(1);
    while (missing.load() > 0) {
    }
  }
  std::atomic<int> missing;
};

static double nanos(Clock::time_point from) { return std::chrono::duration<double, std::nano>(Clock::now() - from).count(); }

// Threads with a device each. They are kept, so that no set-up is timed.
template <typename F>
static std::vector<double> on_threads(int threads, F work) {
  std::vector<double> answers(threads);
  std::vector<std::exception_ptr> failures(threads);
  std::vector<std::thread> all;
  for (int i = 0; i < threads; i++) {
    all.emplace_back([&, i] {
      try {
        answers[i] = work(i);
      } catch (...) {
        failures[i] = std::current_exception();
      }
    });
  }
  for (auto& thread : all) thread.join();
  for (auto& failure : failures)
    if (failure) std::rethrow_exception(failure);
  return answers;
}

static double mean(const std::vector<double>& all) { return std::accumulate(all.begin(), all.end(), 0.0) / all.size(); }

// Sets the calling thread's device.
static cudaStream_t enter(int device) {
  c10::cuda::set_device(static_cast<c10::DeviceIndex>(device));
  return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device)).stream();
}

static double pair(size_t bytes, int threads, size_t rounds) {
  Start start(threads);
  return mean(on_threads(threads, [&](int device) {
    cudaStream_t stream = enter(device);
    for (size_t i = 0; i < rounds / 10 + 1; i++) allocator::raw_delete(allocator::raw_alloc_with_stream(bytes, stream));
    start.wait();
    auto clock = Clock::now();
    for (size_t i = 0; i < rounds; i++) allocator::raw_delete(allocator::raw_alloc_with_stream(bytes, stream));
    return nanos(clock) / rounds;
  }));
}

static double remote(size_t bytes, int threads, size_t blocks) {
  cudaStream_t stream = enter(0);
  std::vector<std::vector<void*>> batches(threads);
  for (auto& batch : batches)
    for (size_t i = 0; i < blocks; i++) batch.push_back(allocator::raw_alloc_with_stream(bytes, stream));
  Start start(threads);
  return mean(on_threads(threads, [&](int thread) {
    enter(0);
    start.wait();
    auto clock = Clock::now();
    for (void* block : batches[thread]) allocator::raw_delete(block);
    return nanos(clock) / blocks;
  }));
}

struct Side {
  Trace trace;
  std::vector<std::vector<void*>> slots;  // of each device

  uint64_t replay(std::vector<void*>& held, const Step* step, const Step* end, cudaStream_t stream) {
    uint64_t refused = 0;
    for (; step != end; step++) {
      void*& slot = held[step->slot];
      if (step->bytes == 0) {
        if (slot) allocator::raw_delete(slot);
        slot = nullptr;
      } else {
        try {
          slot = allocator::raw_alloc_with_stream(step->bytes, stream);
        } catch (const c10::OutOfMemoryError&) {
          slot = nullptr;
          refused++;
        }
      }
    }
    return refused;
  }

  void load(const std::string& path, int devices, double fraction) {
    for (auto& held : slots)
      for (void*& slot : held) {
        if (slot) allocator::raw_delete(slot);
        slot = nullptr;
      }
    allocator::emptyCache();
    std::ifstream file(path, std::ios::binary);
    uint64_t head[4];
    file.read(reinterpret_cast<char*>(head), sizeof head);
    trace = Trace();
    trace.slots = head[0];
    trace.operations = head[1] ? head[1] : 1;
    trace.first.resize(head[2]);
    trace.again.resize(head[3]);
    file.read(reinterpret_cast<char*>(trace.first.data()), head[2] * sizeof(Step));
    file.read(reinterpret_cast<char*>(trace.again.data()), head[3] * sizeof(Step));
    if (!file) throw std::runtime_error("the trace cannot be read: " + path);
    slots.assign(devices, std::vector<void*>(trace.slots, nullptr));
    for (int device = 0; device < devices; device++) {
      enter(device);
      allocator::setMemoryFraction(device == 0 ? fraction : 1.0, device);
      allocator::resetPeakStats(device);
    }
  }

  double first(size_t steps) {
    size_t from = trace.next, to = std::min(trace.first.size(), from + steps);
    trace.next = to;
    auto refused = on_threads(slots.size(), [&](int device) {
      cudaStream_t stream = enter(device);
      return static_cast<double>(replay(slots[device], trace.first.data() + from, trace.first.data() + to, stream));
    });
    return std::accumulate(refused.begin(), refused.end(), 0.0);
  }

  double again(size_t rounds) {
    Start start(slots.size());
    return mean(on_threads(slots.size(), [&](int device) {
      cudaStream_t stream = enter(device);
      const Step* from = trace.again.data();
      const Step* to = from + trace.again.size();
      if (trace.operations < 1000) replay(slots[device], from, to, stream);
      start.wait();
      auto clock = Clock::now();
      uint64_t refused = 0;
      for (size_t i = 0; i < rounds; i++) refused += replay(slots[device], from, to, stream);
      double taken = nanos(clock) / (rounds * trace.operations);
      if (refused) throw std::runtime_error("out of memory in a trace that is timed");
      return taken;
    }));
  }
};

static double answer(Side& side, double& fraction, const std::string& order, uint64_t number) {
  std::vector<std::string> parts;
  std::stringstream text(order);
  for (std::string part; std::getline(text, part, ':');) parts.push_back(part);
  const std::string& what = parts.at(0);
  auto stats = [] { return allocator::getDeviceStats(0); };
  const size_t all = 0;  // StatType::AGGREGATE, in whichever namespace it is
  if (what == "pair") return pair(std::stoull(parts.at(1)), std::stoi(parts.at(2)), number);
  if (what == "remote") return remote(std::stoull(parts.at(1)), std::stoi(parts.at(2)), number);
  if (what == "limit") {
    size_t free = 0, total = 0;
    enter(0);
    if (cudaMemGetInfo(&free, &total) != cudaSuccess) throw std::runtime_error("cudaMemGetInfo");
    fraction = number ? static_cast<double>(number) / total : 1.0;
    return 0;
  }
  if (what == "load") return side.load(parts.at(1), number, fraction), 0;
  if (what == "first") return side.first(number);
  if (what == "again") return side.again(number);
  if (what == "calls") return stats().num_device_alloc + stats().num_device_free;
  if (what == "reserved") return stats().reserved_bytes[all].current;
  if (what == "peak_reserved") return stats().reserved_bytes[all].peak;
  if (what == "peak_allocated") return stats().allocated_bytes[all].peak;
  throw std::runtime_error("what is " + order + "?");
}

int main() {
  try {
    allocator::init(c10::cuda::device_count());
    Side side;
    double fraction = 1.0;
    std::string order;
    uint64_t number;
    while (std::cin >> order >> number) {
      std::printf("%.6f\n", answer(side, fraction, order, number));
      std::fflush(stdout);
    }
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "torch_allocator: %s\n", failure.what());
    return 1;
  }
}
