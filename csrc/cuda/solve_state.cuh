// A tile of the state in shared memory: kStateRows value rows of one head with their full key dimension, in
// float32. Read once, with 16-byte accesses; written back where pending factors were folded in, or at the end
// of a prefill.
#pragma once

#include "solve_tokens.cuh"

namespace specdec::cuda {

constexpr int kStateRows = 32;
constexpr int kPendingRows = 16;  // pending factors that are staged at a time

template <int kWarps>
class StateRows {
 public:
  // rows [kStateRows, ld]
  SPECDEC_DEVICE StateRows(const StateView& view, int DK, const Shared<float>& rows)
      : f32_(static_cast<float*>(view.data)),
        bf16_(static_cast<bfloat16*>(view.data)),
        wide_(view.dtype == DType::kFloat32),
        DK_(DK),
        ld_(DK + 4),
        rows_(rows) {}

  // Starts to read the tile at element `at`. A bfloat16 state is read by `finish`, for it has to be widened.
  SPECDEC_DEVICE void begin(int64_t at) const {
    if (!wide_) return;
    SPECDEC_UNROLL
    for (int q = 0; q < kQuads; ++q) {
      const int c = 4 * lane() + 128 * q;
      if (c >= DK_) break;
      SPECDEC_ROLL
      for (int r = warp(); r < kStateRows; r += kWarps) {
        copy_async<4>(rows_, r * ld_ + c, Global<const float>(f32_), at + static_cast<int64_t>(r) * DK_ + c);
      }
    }
  }

  // The tile is there for the lanes that read it; others need a barrier.
  SPECDEC_DEVICE void finish(int64_t at) const {
    if (wide_) {
      copy_async_wait<0>();
      return;
    }
    const int c = 8 * lane();
    if (c >= DK_) return;
    for (int r = warp(); r < kStateRows; r += kWarps) {
      const Pack<bfloat16, 8> x = bf16_.template load_vec<8>(at + static_cast<int64_t>(r) * DK_ + c);
      rows_.template store_vec<4>(r * ld_ + c,
                                  {{float_of(x[0]), float_of(x[1]), float_of(x[2]), float_of(x[3])}});
      rows_.template store_vec<4>(r * ld_ + c + 4,
                                  {{float_of(x[4]), float_of(x[5]), float_of(x[6]), float_of(x[7])}});
    }
  }

  // Writes the tile, rounded once, and keeps what was written. A warp writes the rows that it has finished
  // and folded.
  SPECDEC_DEVICE void store(int64_t at) const {
    if (wide_) {
      SPECDEC_UNROLL
      for (int q = 0; q < kQuads; ++q) {
        const int c = 4 * lane() + 128 * q;
        if (c >= DK_) break;
        SPECDEC_ROLL
        for (int r = warp(); r < kStateRows; r += kWarps) {
          f32_.template store_vec<4>(at + static_cast<int64_t>(r) * DK_ + c,
                                     rows_.template load_vec<4>(r * ld_ + c));
        }
      }
      return;
    }
    const int c = 8 * lane();
    if (c >= DK_) return;
    SPECDEC_ROLL
    for (int r = warp(); r < kStateRows; r += kWarps) {
      Pack<bfloat16, 8> narrow;
      SPECDEC_UNROLL
      for (int h = 0; h < 8; h += 4) {
        Pack<float, 4> x = rows_.template load_vec<4>(r * ld_ + c + h);
        SPECDEC_UNROLL
        for (int e = 0; e < 4; ++e) {
          narrow[h + e] = round_to<bfloat16>(x[e]);
          x[e] = float_of(narrow[h + e]);
        }
        rows_.template store_vec<4>(r * ld_ + c + h, x);
      }
      bf16_.template store_vec<8>(at + static_cast<int64_t>(r) * DK_ + c, narrow);
    }
  }

  // S <- fma(u_j, k_j, a_j S) for `count` factors in order: "The step, to the bit". k [count, DK], u [count,
  // kStateRows], decay [count] or, with a gate per channel, [count, DK].
  SPECDEC_DEVICE void fold(const Shared<float>& k, const Shared<float>& u, const Shared<float>& decay,
                           Gate gate, int count) const {
    const int words = wide_ ? 4 : 8;  // a lane stores what it has folded
    SPECDEC_ROLL
    for (int c = words * lane(); c < DK_; c += words * 32) {
      SPECDEC_ROLL
      for (int h = 0; h < words; h += 4) {
        SPECDEC_ROLL
        for (int r = warp(); r < kStateRows; r += kWarps) {
          const int at = r * ld_ + c + h;
          Pack<float, 4> s = rows_.template load_vec<4>(at);
          for (int j = 0; j < count; ++j) {
            if (gate == Gate::kHead) {
              const float a = decay.load(j);
              SPECDEC_UNROLL
              for (int e = 0; e < 4; ++e) s[e] = a * s[e];
            } else if (gate == Gate::kChannel) {
              const Pack<float, 4> a = decay.template load_vec<4>(j * DK_ + c + h);
              SPECDEC_UNROLL
              for (int e = 0; e < 4; ++e) s[e] = a[e] * s[e];
            }
            const float write = u.load(j * kStateRows + r);
            const Pack<float, 4> key = k.template load_vec<4>(j * DK_ + c + h);
            SPECDEC_UNROLL
            for (int e = 0; e < 4; ++e) s[e] = fma(write, key[e], s[e]);
          }
          rows_.template store_vec<4>(at, s);
        }
      }
    }
  }

 private:
  Global<float> f32_;
  Global<bfloat16> bf16_;
  bool wide_;
  int DK_, ld_;
  Shared<float> rows_;
};

}  // namespace specdec::cuda
