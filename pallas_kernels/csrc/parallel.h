// Work shared over XLA's own intra-op threads.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <thread>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif
#include "xla/ffi/api/ffi.h"

namespace cpu_kernels {

// Round to nearest and subnormals flushed, on whichever thread: a pool's threads and its callers
// may differ in that, and results must not depend on who computed them.
class FloatMode {
 public:
#if defined(__x86_64__)
  FloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x9fc0); }
  ~FloatMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#endif
};

// Memory of this thread for kernels, kept between calls.
inline float* thread_scratch(int64_t floats) {
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  thread_local std::unique_ptr<float, Free> memory;
  thread_local int64_t size = 0;
  if (floats > size) {
    memory.reset(static_cast<float*>(std::aligned_alloc(64, (floats * sizeof(float) + 63) & ~63)));
    size = memory ? floats : 0;
  }
  return memory.get();
}

// Calls body(i) for every i in [0, n), on the caller and on the pool's threads. The caller works
// too and waits only for calls that a thread has begun, so a busy pool cannot block it; a task that
// starts late finds nothing left and touches only the shared counters.
template <class Body>
void parallel_for(xla::ffi::ThreadPool& pool, int64_t n, const Body& body) {
  const int64_t threads = std::min<int64_t>(n, pool.num_threads());
  if (threads <= 1) {
    FloatMode mode;
    for (int64_t i = 0; i < n; i++) body(i);
    return;
  }
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto shared = std::make_shared<Shared>();
  const Body* work = &body;  // outlives every begun call: the caller waits for those
  auto drain = [shared, work, n] {
    FloatMode mode;
    for (int64_t i; (i = shared->next.fetch_add(1)) < n;) {
      (*work)(i);
      shared->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t t = 1; t < threads; t++) pool.Schedule([drain] { drain(); });
  drain();
  for (int spins = 0; shared->done.load(std::memory_order_acquire) < n; spins++)
    if (spins > 2000) std::this_thread::yield();
}

}  // namespace cpu_kernels
