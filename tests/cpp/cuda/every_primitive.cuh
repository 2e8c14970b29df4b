// A kernel that uses every primitive once: it must compile for every architecture, and simt_test checks what
// it computes.
#pragma once

#include "tensor_cores.cuh"

namespace specdec::cuda {

struct EveryPrimitiveParams {
  const float* x = nullptr;          // [blocks, 256]
  const bfloat16* narrow = nullptr;  // [16, 16]
  float* y = nullptr;                // [blocks, 64]
  float* sum = nullptr;              // [1], added to
  int32_t* flags = nullptr;          // [blocks + 1], zeros: one a block, and the blocks that are done
  int32_t blocks = 0;
};

template <typename T>
struct EveryPrimitive {
  using Params = EveryPrimitiveParams;
  static constexpr int kThreads = 64;

  static Launch shape(const Params& p) { return {{p.blocks, 1, 1}, 256 * sizeof(float) + 256 * sizeof(T)}; }

  SPECDEC_DEVICE static void run(const Params& p, SharedArena shared) {
    const Global<const float> x = Global<const float>(p.x) + int64_t{256} * block().x;
    const Global<float> y(p.y);
    const Shared<float> tile = shared.take<float>(256);
    const Shared<T> narrow = shared.take<T>(256);
    const int t = thread();

    copy_async<4>(tile, 4 * t, x, 4 * t);
    copy_async_commit();
    copy_async<2>(narrow, 4 * t, Global<const T>(p.narrow), 4 * t);
    copy_async<2>(narrow, 4 * t + 2, Global<const T>(p.narrow), 4 * t + 2, true);
    copy_async_commit();
    copy_async_wait<1>();
    copy_async_wait<0>();
    barrier();

    float total = 0.0f;
    const Pack<float, 4> four = (tile + 4 * t).load_vec<4>(0);
    for (int i = 0; i < 4; ++i) total = fma(four[i], four[i], total);
    total += float_of(narrow.load(t)) + x.load(t) + x.load_vec<2>(2 * t)[1];
    for (int mask = 16; mask > 0; mask /= 2) total += shuffle_xor(total, mask);
    total += shuffle(total, 3) + shuffle_down(total, 1);
    if (any(total > 1.0f) && !all(total > 1.0f)) total += static_cast<float>(ballot(total > 1.0f) & 1u);
    warp_barrier();

    float d[4] = {};
    const float a[4] = {to_tf32(four[0]), to_tf32(four[1]), to_tf32(four[2]), to_tf32(four[3])};
    const float b[2] = {a[0], a[1]};
    mma_tf32(d, a, b);
    uint32_t rows[4], columns[2], one[1];
    load_matrix(rows, narrow, (lane() % 16) * 16 + lane() / 16 * 8);
    load_matrix_transposed(columns, narrow, lane() % 16 * 16);
    load_matrix(one, narrow, lane() % 8 * 16);
    mma_bf16(d, rows, columns);
    d[0] += static_cast<float>(one[0] == pack_bf16(0.0f, 1.0f)) + float_of(round_to<T>(d[1]));
    total +=
        d[0] + d[1] + exp(-d[2] * d[2]) + log1p(d[3] * d[3]) + rsqrt(1.0f + d[2] * d[2]) + sqrt(d[3] * d[3]);

    barrier(1, kThreads);
    tile.store(t, total);
    tile.store_vec(64 + 2 * t, Pack<float, 2>{{total, total}});
    barrier();
    y.store(block().x * 64 + t, tile.load(t ^ 1) + tile.load(64 + (t ^ 3)));
    Global<float>(p.sum).atomic_add(0, 1.0f);
    barrier();
    if (t == 0) {
      const Global<int32_t> flags(p.flags);
      fence();
      flags.store_release(block().x, 1);
      while (flags.load_acquire((block().x + 1) % blocks().x) == 0) {
      }
      flags.atomic_add(p.blocks, 1);
    }
  }
};

}  // namespace specdec::cuda
