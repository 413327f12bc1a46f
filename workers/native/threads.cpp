#include "threads.h"

#include <ATen/Parallel.h>
#include <immintrin.h>
#include <pthread.h>
#include <signal.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>

namespace actorserve {
namespace {

constexpr int kPausesBeforeSleep = 30'000;  // about 1 ms: longer than Python takes from one kernel to the next
constexpr int kPausesBeforeYield = 200;
constexpr size_t kCacheLine = 64;

// The helpers of a calling thread, and the loop that they share.
class Crew {
 public:
  void run(int64_t size, int64_t num_pieces, int64_t num_helpers, const RangeFunction& function) {
    hire(num_helpers);
    function_ = &function;
    size_ = size;
    per_piece_ = (size + num_pieces - 1) / num_pieces;
    const int64_t pieces = (size + per_piece_ - 1) / per_piece_;
    num_done_.store(0, std::memory_order_relaxed);
    loop_.store(Loop::begin(pieces), std::memory_order_seq_cst);
    if (num_asleep_.load(std::memory_order_seq_cst) > 0) loop_.notify_all();
    help();
    for (int pauses = 0; num_done_.load(std::memory_order_acquire) < pieces; ++pauses) {
      if (pauses < kPausesBeforeYield) _mm_pause();
      else std::this_thread::yield();  // a helper with a piece may have no core
    }
  }

 private:
  // The number of pieces, and the next one to be taken, in one word: so a thread that comes late for a loop takes a
  // piece of the next loop, or none, but never one of a loop that has ended.
  struct Loop {
    static constexpr int kBits = 32;
    static uint64_t begin(int64_t pieces) { return static_cast<uint64_t>(pieces) << kBits; }
    explicit Loop(uint64_t word)
        : pieces(static_cast<int64_t>(word >> kBits)), next(static_cast<int64_t>(word & 0xffffffffu)) {}
    bool has_more() const { return next < pieces; }
    int64_t pieces, next;
  };

  void hire(int64_t num_helpers) {
    if (num_hired_ >= num_helpers) return;
    sigset_t all, before;  // signals are for the threads of Python
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; num_hired_ < num_helpers; ++num_hired_) {
      std::thread helper([this] { serve(); });
      pthread_setname_np(helper.native_handle(), "kernels");
      helper.detach();
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  // Takes pieces of the loop until there is none left.
  void help() {
    while (Loop(loop_.load(std::memory_order_relaxed)).has_more()) {
      const Loop taken(loop_.fetch_add(1, std::memory_order_acq_rel));
      if (!taken.has_more()) return;
      const int64_t begin = taken.next * per_piece_;
      (*function_)(begin, std::min(begin + per_piece_, size_));
      num_done_.fetch_add(1, std::memory_order_release);
    }
  }

  [[noreturn]] void serve() {
    while (true) {
      int pauses = 0;
      while (pauses < kPausesBeforeSleep && !Loop(loop_.load(std::memory_order_relaxed)).has_more()) {
        _mm_pause();
        ++pauses;
      }
      if (pauses == kPausesBeforeSleep) {
        num_asleep_.fetch_add(1, std::memory_order_seq_cst);
        const uint64_t seen = loop_.load(std::memory_order_seq_cst);
        if (!Loop(seen).has_more()) loop_.wait(seen);
        num_asleep_.fetch_sub(1, std::memory_order_relaxed);
      }
      help();
    }
  }

  alignas(kCacheLine) std::atomic<uint64_t> loop_ = 0;
  alignas(kCacheLine) std::atomic<int64_t> num_done_ = 0;
  alignas(kCacheLine) std::atomic<int> num_asleep_ = 0;
  // Written before the loop begins, and read by threads that have taken a piece of it.
  const RangeFunction* function_ = nullptr;
  int64_t size_ = 0, per_piece_ = 0;
  int64_t num_hired_ = 0;
};

std::atomic<bool> is_crew_wanted = false;
std::mutex crew_is_busy;
thread_local bool is_in_loop = false;

Crew& crew() {
  static Crew* const crew = new Crew;  // never deleted, because its threads live as long as the process
  return *crew;
}

void use_own_threads(bool wanted) { is_crew_wanted = wanted; }

}  // namespace

int64_t num_threads() { return at::get_num_threads(); }

void parallel_for(int64_t size, int64_t grain, const RangeFunction& function) {
  if (size <= 0) return;
  if (!is_crew_wanted.load(std::memory_order_relaxed)) return at::parallel_for(0, size, grain, function);
  const int64_t threads = num_threads();
  const int64_t num_pieces = std::min((size + grain - 1) / grain, threads);
  std::unique_lock<std::mutex> lock(crew_is_busy, std::defer_lock);
  if (num_pieces <= 1 || threads <= 1 || is_in_loop || !lock.try_lock()) return function(0, size);
  is_in_loop = true;
  crew().run(size, num_pieces, threads - 1, function);
  is_in_loop = false;
}

TORCH_LIBRARY_FRAGMENT(actorserve, m) { m.def("use_own_threads(bool wanted) -> ()", &use_own_threads); }

}  // namespace actorserve
