// Loops that several threads share.
//
// OpenMP gives each thread its share beforehand, and waits at the end of each loop until every thread has been there.
// So another program that takes a core for some milliseconds stops all threads, several hundred times a step. Here a
// thread takes one piece after the other, and the calling thread waits for taken pieces only: a thread without a core
// delays nobody.
//
// Torch's own kernels use OpenMP, whose threads keep their cores for a while after a loop. So these threads are for
// models whose layers are all ours, and `use_own_threads` says so. Otherwise the loops are OpenMP's.
#pragma once

#include <cstdint>
#include <memory>

namespace actorserve {

// Refers to a function of a range (begin, end), which must outlive it.
class RangeFunction {
 public:
  template <typename Function>
  RangeFunction(const Function& function)
      : object_(std::addressof(function)), call_([](const void* object, int64_t begin, int64_t end) {
          (*static_cast<const Function*>(object))(begin, end);
        }) {}

  void operator()(int64_t begin, int64_t end) const { call_(object_, begin, end); }

 private:
  const void* object_;
  void (*call_)(const void*, int64_t, int64_t);
};

// The number of threads that share a loop of the calling thread: torch's number.
int64_t num_threads();

// Calls `function(begin, end)` for ranges that cover 0 to `size` together. A range has at least `grain` iterations, but
// for the last one. `function` must not throw.
void parallel_for(int64_t size, int64_t grain, const RangeFunction& function);

}  // namespace actorserve
