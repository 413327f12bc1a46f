// Dot products of up to 16 rows of 8-bit inputs with panels of 16 columns of weights, by AMX. Sums of integers are exact,
// so they have the same bits as by AVX-512 VNNI.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#include "gemm_avx512.h"

namespace actorserve {
namespace {  // private to the file that includes this header

// Linux grants a process the use of AMX's tiles on request.
inline bool amx_is_granted() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool is_granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return is_granted;
}

// All tiles have 16 rows of 64 bytes.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);

struct Int8AmxKernel {
  using Input = uint8_t;
  using Fallback = ByRows<Int8Kernel>;
  static constexpr int kMaxRows = Int8Kernel::kMaxRows;
  static constexpr int kPanels = 4;  // so many products at a time hide the latency of each
  static constexpr int64_t kSlackInputs = kMaxRows * kSliceInputs;  // a tile of few rows is read as one of 16

  // The tiles of this thread, while it multiplies. (GCC's intrinsic does not say that it reads the whole configuration.)
  struct Session {
    Session() {
      if (!amx_is_granted()) return;
      const TileConfig config;
      asm volatile("ldtilecfg %0" : : "m"(config));
    }
    ~Session() {
      if (amx_is_granted()) _tile_release();
    }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };

  // sums[panel][row][column] of a tile of rows and neighbouring panels. Rows behind the tile's get any numbers.
  static void run(const Input* tile, int64_t num_rows, const Panel* panels, int64_t num_panels, int32_t* sums) {
    if (num_rows < kLeastRows || panels[0].num_steps % kSteps != 0 || !amx_is_granted()) {
      for (int64_t panel = 0; panel < num_panels; ++panel) {
        Fallback::run(tile, num_rows, panels + panel, 1, sums + panel * kNumSums);
      }
      return;
    }
    switch (num_panels) {
      case 1: return multiply<1>(tile, num_rows, panels, sums);
      case 2: return multiply<2>(tile, num_rows, panels, sums);
      case 3: return multiply<3>(tile, num_rows, panels, sums);
      default: return multiply<4>(tile, num_rows, panels, sums);
    }
  }

 private:
  static constexpr int64_t kLeastRows = 4;  // fewer rows wait for the weights' memory anyway
  static constexpr int64_t kSteps = kSliceInputs / 4;  // of a slice
  static constexpr int64_t kNumSums = kMaxRows * kPanelColumns;

  // Tiles 0 to 3 hold the sums of each panel, 4 the rows, 5 to 7 the weights.
  template <int kCount>
  static void multiply(const Input* tile, int64_t num_rows, const Panel* panels, int32_t* sums) {
    const int64_t num_slices = panels[0].num_steps / kSteps, slice_bytes = num_rows * kSliceInputs;
    _tile_zero(0);
    if constexpr (kCount > 1) _tile_zero(1);
    if constexpr (kCount > 2) _tile_zero(2);
    if constexpr (kCount > 3) _tile_zero(3);
    for (int64_t slice = 0; slice < num_slices; ++slice) {
      const auto weights = [&](int panel) { return panels[panel].weights + slice * kSteps * kStepBytes; };
      _tile_loadd(4, tile + slice * slice_bytes, kSliceInputs);
      _tile_loadd(5, weights(0), kStepBytes);
      _tile_dpbusd(0, 4, 5);
      if constexpr (kCount > 1) {
        _tile_loadd(6, weights(1), kStepBytes);
        _tile_dpbusd(1, 4, 6);
      }
      if constexpr (kCount > 2) {
        _tile_loadd(7, weights(2), kStepBytes);
        _tile_dpbusd(2, 4, 7);
      }
      if constexpr (kCount > 3) {
        _tile_loadd(5, weights(3), kStepBytes);
        _tile_dpbusd(3, 4, 5);
      }
      for (int panel = 0; panel < kCount; ++panel) {
#pragma GCC unroll 16
        for (int64_t step = 0; step < kSteps; ++step) prefetch_weights<kMaxRows>(weights(panel) + step * kStepBytes);
      }
    }
    constexpr int64_t kRowBytes = kPanelColumns * sizeof(int32_t);
    _tile_stored(0, sums, kRowBytes);
    if constexpr (kCount > 1) _tile_stored(1, sums + kNumSums, kRowBytes);
    if constexpr (kCount > 2) _tile_stored(2, sums + 2 * kNumSums, kRowBytes);
    if constexpr (kCount > 3) _tile_stored(3, sums + 3 * kNumSums, kRowBytes);
  }
};

}  // namespace
}  // namespace actorserve
