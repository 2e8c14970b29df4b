// What tokens bring to a block, on its way from global memory to the step: a few tokens at a time are copied
// asynchronously as they are, while the tokens before them are stepped, then turned into what the step reads:
// keys and queries in float32, normalised and scaled, placed as the lanes read them, decays, k q. Stored
// factors of earlier tokens (pending, prefix) take the same way.
#pragma once

#include "primitives.cuh"
#include "specdec/params.h"
#include "state_tile.cuh"

namespace specdec::cuda {

SPECDEC_DEVICE float load_float(const void* data, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kBFloat16:
      return float_of(Global<const bfloat16>(static_cast<const bfloat16*>(data)).load(i));
    case DType::kFloat16:
      return float_of(Global<const half>(static_cast<const half*>(data)).load(i));
    default:
      return Global<const float>(static_cast<const float*>(data)).load(i);
  }
}
SPECDEC_DEVICE void store_float(void* data, DType dtype, int64_t i, float x) {
  switch (dtype) {
    case DType::kBFloat16:
      Global<bfloat16>(static_cast<bfloat16*>(data)).store(i, round_to<bfloat16>(x));
      break;
    case DType::kFloat16:
      Global<half>(static_cast<half*>(data)).store(i, round_to<half>(x));
      break;
    default:
      Global<float>(static_cast<float*>(data)).store(i, x);
  }
}

SPECDEC_HOST_DEVICE int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Rows of `count` elements of any type, as they are: room for float32.
class RawRow {
 public:
  // The same memory with the three element types.
  SPECDEC_DEVICE RawRow(SharedArena& shared, int64_t floats) {
    SharedArena other = shared, third = shared;
    f32_ = shared.take<float>(floats);
    bf16_ = other.take<bfloat16>(2 * floats);
    f16_ = third.take<half>(2 * floats);
  }
  SPECDEC_DEVICE RawRow operator+(int floats) const {
    return RawRow(f32_ + floats, bf16_ + 2 * floats, f16_ + 2 * floats);
  }

  SPECDEC_DEVICE float load(DType dtype, int i) const {
    switch (dtype) {
      case DType::kBFloat16:
        return float_of(bf16_.load(i));
      case DType::kFloat16:
        return float_of(f16_.load(i));
      default:
        return f32_.load(i);
    }
  }
  SPECDEC_DEVICE void store(DType dtype, int i, float x) const {
    switch (dtype) {
      case DType::kBFloat16:
        return bf16_.store(i, round_to<bfloat16>(x));
      case DType::kFloat16:
        return f16_.store(i, round_to<half>(x));
      default:
        f32_.store(i, x);
    }
  }
  SPECDEC_DEVICE const Shared<float>& floats() const { return f32_; }

  // By a warp: elements [at, at + count) of `data`. Aligned: all of it is a multiple of 16 bytes.
  SPECDEC_DEVICE void copy(const void* data, DType dtype, bool aligned, int64_t at, int count) const {
    if (aligned) {
      const Global<const float> words(static_cast<const float*>(data));
      const int64_t first = dtype == DType::kFloat32 ? at : at / 2;
      const int n = dtype == DType::kFloat32 ? count : count / 2;
      SPECDEC_ROLL
      for (int i = 4 * lane(); i < n; i += 128) copy_async<4>(f32_, i, words, first + i);
    } else if (dtype == DType::kFloat32) {
      copy_elements(f32_, static_cast<const float*>(data), at, count);
    } else {  // 16 bits, whatever they mean
      copy_elements(bf16_, static_cast<const bfloat16*>(data), at, count);
    }
  }

 private:
  SPECDEC_DEVICE RawRow(Shared<float> f32, Shared<bfloat16> bf16, Shared<half> f16)
      : f32_(f32), bf16_(bf16), f16_(f16) {}

  template <typename T>
  SPECDEC_DEVICE static void copy_elements(const Shared<T>& to, const T* from, int64_t at, int count) {
    const Global<const T> elements(from);
    SPECDEC_ROLL
    for (int i = lane(); i < count; i += 32) to.store(i, elements.load(at + i));
  }

  Shared<float> f32_;
  Shared<bfloat16> bf16_;
  Shared<half> f16_;
};

// May [B, N, H, D] rows be copied 16 bytes at a time?
SPECDEC_DEVICE bool rows_aligned(const void* data, DType dtype, const Strides& s) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && (s.b | s.n | s.h) * size_of(dtype) % 16 == 0;
}

// Where a block works.
struct Place {
  int64_t b = 0;
  int hv = 0, hk = 0;
  int row = 0;         // first value row of the tile
  bool first = false;  // of the tiles of its value head: writes what does not depend on the value row

  template <int kRows>
  SPECDEC_DEVICE static Place of(const Recurrence& rec, int64_t index) {
    const int64_t tiles = rec.DV / kRows, head = index / tiles;
    Place at;
    at.b = head / rec.HV;
    at.hv = static_cast<int>(head % rec.HV);
    at.hk = static_cast<int>(at.hv / (rec.HV / rec.HK));
    at.row = static_cast<int>(index % tiles) * kRows;
    at.first = at.row == 0;
    return at;
  }
};

// kQueries: tokens come with queries; without, stored factors alone.
template <typename Traits, bool kQueries>
class TokenStage {
  static constexpr int kDK = Traits::kDK, kRows = Traits::kRows;
  static constexpr bool kChannel = Traits::kChannelGate;
  static constexpr int kWarps = Traits::kThreads / 32;
  // Of a token as it is: k, q, v or u, the gates of the channels, then {gate of the head, beta}.
  static constexpr int kRawQ = kDK, kRawV = kRawQ + (kQueries ? kDK : 0), kRawG = kRawV + kRows;
  static constexpr int kRawScalars = kRawG + (kChannel ? kDK : 0), kRaw = kRawScalars + 4;
  // Of a token as the step reads it: k, q, decays of the channels, then {decay of the head, beta, k q}.
  static constexpr int kReadyQ = kDK, kReadyDecay = kReadyQ + (kQueries ? kDK : 0);
  static constexpr int kReadyScalars = kReadyDecay + (kChannel ? kDK : 0), kReady = kReadyScalars + 4;

 public:
  static constexpr int kTokens = kDK > 128 ? 4 : 8;  // staged at a time
  static constexpr int64_t kSharedBytes = (2 * kRaw + kReady) * kTokens * static_cast<int64_t>(sizeof(float));

  SPECDEC_DEVICE explicit TokenStage(SharedArena& shared)
      : raw_(shared, 2 * kTokens * kRaw), ready_(shared.take<float>(kTokens * kReady)) {}

  // Takes `total` tokens through the stage, token t as token i of a bank. copy(bank, i, part, t) by a warp,
  // for the parts 0 to 3 (k, q, v, gates); prepare(bank, t, n) by the block, for the n tokens from t on;
  // step(bank, i, t) by the block, in order.
  template <typename Copy, typename Prepare, typename Step>
  SPECDEC_DEVICE void run(int total, Copy&& copy, Prepare&& prepare, Step&& step) const {
    const auto tokens_from = [&](int t) { return total - t < kTokens ? total - t : kTokens; };
    int bank = 1;
    // A turn without tokens comes first: it starts the copies of the first ones.
    for (int first = -kTokens; first < total; first += kTokens, bank ^= 1) {
      copy_async_wait<0>();
      barrier();
      const int next = first + kTokens;
      if (next < total) {
        const int parts = 4 * tokens_from(next);
        for (int part = warp(); part < parts; part += kWarps)
          copy(bank ^ 1, part / 4, part % 4, next + part / 4);
        copy_async_commit();
      }
      if (first < 0) continue;
      const int tokens = tokens_from(first);
      prepare(bank, first, tokens);
      barrier();
      for (int i = 0; i < tokens; ++i) step(bank, i, first + i);
    }
  }

  // --- copies, by a warp each: token i of the bank ---

  SPECDEC_DEVICE void copy_new(const VerifyParams& p, const Place& at, int bank, int i, int part,
                               int64_t n) const {
    const RawRow to = raw(bank, i);
    if (part == 0) {
      to.copy(p.k, p.dtype, rows_aligned(p.k, p.dtype, p.k_stride), offset(p.k_stride, at.b, n, at.hk), kDK);
    } else if (part == 1) {
      (to + kRawQ)
          .copy(p.q, p.dtype, rows_aligned(p.q, p.dtype, p.q_stride), offset(p.q_stride, at.b, n, at.hk),
                kDK);
    } else if (part == 2) {
      (to + kRawV)
          .copy(p.v, p.dtype, rows_aligned(p.v, p.dtype, p.v_stride),
                offset(p.v_stride, at.b, n, at.hv) + at.row, kRows);
    } else {
      copy_gates(p.g, kChannel && rows_aligned(p.g, DType::kFloat32, p.g_stride),
                 offset(p.g_stride, at.b, n, at.hv), to);
      if (p.beta != nullptr && lane() == 0) {
        copy_async<1>((to + kRawScalars).floats(), 1, Global<const float>(p.beta),
                      offset(p.beta_stride, at.b, n, at.hv));
      }
    }
  }

  SPECDEC_DEVICE void copy_factor(const Recurrence& rec, const FactorsView& view, const Place& at, int bank,
                                  int i, int part, int64_t node) const {
    const RawRow to = raw(bank, i);
    const int64_t token = at.b * view.nodes + node;
    const int64_t head = token * rec.HV + at.hv;
    if (part == 0) {
      to.copy(view.k, DType::kFloat32, rows_aligned(view.k, DType::kFloat32, {}),
              (token * rec.HK + at.hk) * kDK, kDK);
    } else if (part == 2) {
      (to + kRawV)
          .copy(view.u, DType::kFloat32, rows_aligned(view.u, DType::kFloat32, {}), head * rec.DV + at.row,
                kRows);
    } else if (part == 3) {
      copy_gates(view.g, rows_aligned(view.g, DType::kFloat32, {}), kChannel ? head * kDK : head, to);
    }
  }

  // --- what the step reads, by a warp each ---

  // Writes the token's key and gates as factors, too, where the block is the one that has to.
  SPECDEC_DEVICE void prepare_new(const VerifyParams& p, const Place& at, int bank, int i, int64_t n) const {
    constexpr int kEach = kDK / 32;
    const RawRow from = raw(bank, i);
    const Shared<float> to = ready(i);
    float k[kEach], q[kEach];
    SPECDEC_UNROLL
    for (int c = 0; c < kEach; ++c) {
      k[c] = from.load(p.dtype, lane() + 32 * c);
      q[c] = (from + kRawQ).load(p.dtype, lane() + 32 * c);
    }
    if (p.qk_l2norm) {
      const float k_unit = 1.0f / sqrt(dot(k, k) + 1e-6f), q_unit = 1.0f / sqrt(dot(q, q) + 1e-6f);
      SPECDEC_UNROLL
      for (int c = 0; c < kEach; ++c) {
        k[c] = k[c] * k_unit;
        q[c] = q[c] * q_unit;
      }
    }
    if (p.scale != 1.0f) {
      SPECDEC_UNROLL
      for (int c = 0; c < kEach; ++c) q[c] = q[c] * p.scale;
    }
    const float kq = dot(k, q);
    SPECDEC_UNROLL
    for (int c = 0; c < kEach; ++c) {
      const int placed = StateTile<Traits>::place(lane() + 32 * c);
      to.store(placed, k[c]);
      to.store(kReadyQ + placed, q[c]);
    }
    prepare_gates(p.rec.gate, from, to);
    if (lane() == 0) {
      if (p.rec.update == Update::kDelta) to.store(kReadyScalars + 1, (from + kRawScalars).floats().load(1));
      to.store(kReadyScalars + 2, kq);
    }
    if (!at.first) return;
    const int64_t token = at.b * p.N + n, group = p.rec.HV / p.rec.HK;
    if (at.hv % group == 0) {
      const Global<float> keys = Global<float>(p.k_out) + (token * p.rec.HK + at.hk) * kDK;
      SPECDEC_UNROLL
      for (int c = 0; c < kEach; ++c) keys.store(lane() + 32 * c, k[c]);
    }
    if (p.rec.gate == Gate::kNone) return;
    const int64_t head = token * p.rec.HV + at.hv;
    if constexpr (kChannel) {
      const Global<float> gates = Global<float>(p.g_out) + head * kDK;
      for (int c = lane(); c < kDK; c += 32) gates.store(c, (from + kRawG).floats().load(c));
    } else if (lane() == 0) {
      Global<float>(p.g_out).store(head, (from + kRawScalars).floats().load(0));
    }
  }

  SPECDEC_DEVICE void prepare_factor(Gate gate, int bank, int i) const {
    const RawRow from = raw(bank, i);
    const Shared<float> to = ready(i);
    for (int c = lane(); c < kDK; c += 32) to.store(StateTile<Traits>::place(c), from.floats().load(c));
    prepare_gates(gate, from, to);
  }

  // By the block: the keys of a bank for the closed form, from the last token on. `log_decay` is one number,
  // or [DK] placed with a gate per channel: the sum of g over the tokens of the banks before.
  SPECDEC_DEVICE void prepare_closed(Gate gate, int bank, int tokens, bool first,
                                     const Shared<float>& log_decay) const {
    const float before = kChannel || first || gate == Gate::kNone ? 0.0f : log_decay.load(0);
    if constexpr (!kChannel) barrier();  // all have read it
    for (int c = thread(); c < kDK; c += Traits::kThreads) {
      const int placed = StateTile<Traits>::place(c);
      float sum = kChannel && !first ? log_decay.load(placed) : before;
      for (int i = 0; i < tokens; ++i) {
        const float k = raw(bank, i).floats().load(c);
        ready(i).store(placed, gate == Gate::kNone ? k : exp(sum) * k);
        if (gate != Gate::kNone) sum += gates(bank, i).load(kChannel ? c : 0);
      }
      if (kChannel || c == 0) log_decay.store(kChannel ? placed : 0, sum);
    }
  }

  // --- what the step reads ---

  SPECDEC_DEVICE Shared<float> k(int i) const { return ready(i); }
  SPECDEC_DEVICE Shared<float> q(int i) const { return ready(i) + kReadyQ; }
  SPECDEC_DEVICE Shared<float> decays(int i) const { return ready(i) + kReadyDecay; }
  SPECDEC_DEVICE float decay(int i) const { return kChannel ? 1.0f : ready(i).load(kReadyScalars); }
  SPECDEC_DEVICE float beta(int i) const { return ready(i).load(kReadyScalars + 1); }
  SPECDEC_DEVICE float kq(int i) const { return ready(i).load(kReadyScalars + 2); }
  // A token as it is, for what writes one that was not copied: gates() has {gate of the head, beta} then.
  SPECDEC_DEVICE RawRow raw_k(int bank, int i) const { return raw(bank, i); }
  SPECDEC_DEVICE RawRow raw_q(int bank, int i) const { return raw(bank, i) + kRawQ; }
  SPECDEC_DEVICE RawRow v(int bank, int i) const { return raw(bank, i) + kRawV; }
  SPECDEC_DEVICE Shared<float> u(int bank, int i) const { return v(bank, i).floats(); }
  SPECDEC_DEVICE Shared<float> gates(int bank, int i) const {
    return (raw(bank, i) + (kChannel ? kRawG : kRawScalars)).floats();
  }

 private:
  SPECDEC_DEVICE static int64_t offset(const Strides& s, int64_t b, int64_t n, int64_t h) {
    return b * s.b + n * s.n + h * s.h;
  }
  SPECDEC_DEVICE RawRow raw(int bank, int i) const { return raw_ + (bank * kTokens + i) * kRaw; }
  SPECDEC_DEVICE Shared<float> ready(int i) const { return ready_ + i * kReady; }

  SPECDEC_DEVICE void copy_gates(const float* g, bool aligned, int64_t at, const RawRow& to) const {
    if (g == nullptr) return;
    if constexpr (kChannel) {
      (to + kRawG).copy(g, DType::kFloat32, aligned, at, kDK);
    } else if (lane() == 0) {
      copy_async<1>((to + kRawScalars).floats(), 0, Global<const float>(g), at);
    }
  }
  SPECDEC_DEVICE static void prepare_gates(Gate gate, const RawRow& from, const Shared<float>& to) {
    if constexpr (kChannel) {
      for (int c = lane(); c < kDK; c += 32) {
        to.store(kReadyDecay + StateTile<Traits>::place(c), exp((from + kRawG).floats().load(c)));
      }
    } else if (lane() == 0) {
      to.store(kReadyScalars, gate == Gate::kNone ? 1.0f : exp((from + kRawScalars).floats().load(0)));
    }
  }

  // Over the columns lane, lane + 32, ... of all lanes; the same in every lane.
  template <int kEach>
  SPECDEC_DEVICE static float dot(const float (&a)[kEach], const float (&b)[kEach]) {
    float sum = 0.0f;
    SPECDEC_UNROLL
    for (int c = 0; c < kEach; ++c) sum = fma(a[c], b[c], sum);
    SPECDEC_UNROLL
    for (int mask = 16; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
    return sum;
  }

  RawRow raw_;
  Shared<float> ready_;
};

}  // namespace specdec::cuda
