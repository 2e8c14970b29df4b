// Operations of a whole warp: shuffles, votes, matrix products and loads of matrices. The lane that arrives
// last does the work for all, on the operands that wait on the other lanes' stacks.
#include <cstring>

#include "access.h"
#include "executor.h"

namespace specdec::simt {

namespace {

struct ShuffleOperands {
  uint32_t value, result;
  int source;
};

struct VoteOperands {
  bool predicate;
  uint32_t result;
};

struct Tf32Operands {
  float* d;
  const float* a;
  const float* b;
};

struct Bf16Operands {
  float* d;
  const uint32_t* a;
  const uint32_t* b;
};

struct MatrixOperands {
  uint32_t* registers;
  const void* row;  // null: it may not be read
};

template <typename Operands>
Operands& operands(const Warp& warp, int lane) {
  return *static_cast<Operands*>(warp.lanes[lane]->operands);
}

void shuffle(Warp& warp) {
  for (int lane = 0; lane < kWarpSize; ++lane) {
    auto& mine = operands<ShuffleOperands>(warp, lane);
    mine.result = operands<ShuffleOperands>(warp, mine.source).value;
  }
}

void vote(Warp& warp) {
  uint32_t ballot = 0;
  for (int lane = 0; lane < kWarpSize; ++lane) {
    ballot |= static_cast<uint32_t>(operands<VoteOperands>(warp, lane).predicate) << lane;
  }
  for (int lane = 0; lane < kWarpSize; ++lane) operands<VoteOperands>(warp, lane).result = ballot;
}

float float_of_bits(uint32_t bits) {
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

// What the tensor core takes of a register with a tf32 number.
float tf32(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return float_of_bits(bits & 0xffffe000u);
}

// D = D + A B on fragments. The lanes' layouts are those of the PTX ISA, "Matrix fragments for mma.m16n8k8"
// and "mma.m16n8k16 with floating point type": lane = 4 * group + index in the group. Sums are rounded once;
// the order in which the hardware adds is not specified.
template <int K, typename Operands, typename LoadA, typename LoadB>
void multiply(Warp& warp, LoadA load_a, LoadB load_b) {
  double a[16][K], b[K][8];
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const auto& mine = operands<Operands>(warp, lane);
    load_a(mine, lane / 4, lane % 4, a);
    load_b(mine, lane / 4, lane % 4, b);
  }
  double sums[16][8] = {};
  for (int i = 0; i < 16; ++i) {
    for (int k = 0; k < K; ++k) {
      for (int j = 0; j < 8; ++j) sums[i][j] += a[i][k] * b[k][j];
    }
  }
  for (int lane = 0; lane < kWarpSize; ++lane) {
    float* d = operands<Operands>(warp, lane).d;
    const int group = lane / 4, column = lane % 4 * 2;
    for (int r = 0; r < 4; ++r) {
      d[r] = static_cast<float>(static_cast<double>(d[r]) + sums[group + r / 2 * 8][column + r % 2]);
    }
  }
}

void multiply_tf32(Warp& warp) {
  multiply<8, Tf32Operands>(
      warp,
      [](const Tf32Operands& mine, int group, int index, double (*a)[8]) {
        for (int r = 0; r < 4; ++r) a[group + r % 2 * 8][index + r / 2 * 4] = tf32(mine.a[r]);
      },
      [](const Tf32Operands& mine, int group, int index, double (*b)[8]) {
        for (int r = 0; r < 2; ++r) b[index + r * 4][group] = tf32(mine.b[r]);
      });
}

void multiply_bf16(Warp& warp) {
  const auto half_of = [](uint32_t pair, int part) {
    return float_of_bits(part == 0 ? pair << 16 : pair & 0xffff0000u);
  };
  multiply<16, Bf16Operands>(
      warp,
      [&](const Bf16Operands& mine, int group, int index, double (*a)[16]) {
        for (int r = 0; r < 4; ++r) {
          for (int part = 0; part < 2; ++part) {
            a[group + r % 2 * 8][index * 2 + part + r / 2 * 8] = half_of(mine.a[r], part);
          }
        }
      },
      [&](const Bf16Operands& mine, int group, int index, double (*b)[8]) {
        for (int r = 0; r < 2; ++r) {
          for (int part = 0; part < 2; ++part) b[index * 2 + part + r * 8][group] = half_of(mine.b[r], part);
        }
      });
}

// Lane l's register m gets elements (row l / 4, columns 2 (l % 4) and one more) of matrix m, whose rows are
// where lanes 8 m to 8 m + 7 point; transposed, of the transposed matrix.
void load_matrices(Warp& warp, int matrices, bool transposed) {
  for (int m = 0; m < matrices; ++m) {
    uint16_t elements[8][8];
    for (int row = 0; row < 8; ++row) {
      const void* from = operands<MatrixOperands>(warp, m * 8 + row).row;
      if (from == nullptr) {
        std::memset(elements[row], 0, sizeof(elements[row]));
      } else {
        std::memcpy(elements[row], from, sizeof(elements[row]));
      }
    }
    for (int lane = 0; lane < kWarpSize; ++lane) {
      const int row = lane / 4, column = lane % 4 * 2;
      const uint16_t low = transposed ? elements[column][row] : elements[row][column];
      const uint16_t high = transposed ? elements[column + 1][row] : elements[row][column + 1];
      operands<MatrixOperands>(warp, lane).registers[m] = low | static_cast<uint32_t>(high) << 16;
    }
  }
}

Executor& call(Where where, uint32_t& place) {
  Executor& executor = *current->block->executor;
  place = executor.session.places.number(where);
  ++executor.session.report.primitive_calls;
  return executor;
}

}  // namespace

void execute_operation(Warp& warp) {
  const Thread& any = *warp.lanes[0];
  KernelCounts& counts = any.block->executor->counts;
  switch (any.sync) {
    case Sync::kWarpBarrier:
      ++counts.warp_barriers;
      break;
    case Sync::kShuffle:
      ++counts.shuffles;
      shuffle(warp);
      break;
    case Sync::kVote:
      ++counts.votes;
      vote(warp);
      break;
    case Sync::kMmaTf32:
      ++counts.mma_tf32;
      multiply_tf32(warp);
      break;
    case Sync::kMmaBf16:
      ++counts.mma_bf16;
      multiply_bf16(warp);
      break;
    case Sync::kLoadMatrix:
      ++counts.load_matrices;
      load_matrices(warp, any.detail / 2, any.detail % 2 != 0);
      break;
    case Sync::kNone:
    case Sync::kBarrier:
      break;
  }
}

uint32_t shuffle(uint32_t value, int source_lane, Where where) {
  uint32_t place;
  Executor& executor = call(where, place);
  ShuffleOperands operands{value, 0, source_lane & (kWarpSize - 1)};
  executor.wait_for_warp(Sync::kShuffle, 0, &operands, place);
  return operands.result;
}

uint32_t ballot(bool predicate, Where where) {
  uint32_t place;
  Executor& executor = call(where, place);
  VoteOperands operands{predicate, 0};
  executor.wait_for_warp(Sync::kVote, 0, &operands, place);
  return operands.result;
}

void mma_tf32(float* d, const float* a, const float* b, Where where) {
  uint32_t place;
  Executor& executor = call(where, place);
  Tf32Operands operands{d, a, b};
  executor.wait_for_warp(Sync::kMmaTf32, 0, &operands, place);
}

void mma_bf16(float* d, const uint32_t* a, const uint32_t* b, Where where) {
  uint32_t place;
  Executor& executor = call(where, place);
  Bf16Operands operands{d, a, b};
  executor.wait_for_warp(Sync::kMmaBf16, 0, &operands, place);
}

void load_matrix(uint32_t* registers, int matrices, bool transposed, SharedRange range, int64_t offset,
                 Where where) {
  uint32_t place;
  Executor& executor = call(where, place);
  MatrixOperands operands{registers, nullptr};
  if (current->lane < 8 * matrices) operands.row = read_shared(range, offset, 16, where);
  executor.wait_for_warp(Sync::kLoadMatrix, matrices * 2 + (transposed ? 1 : 0), &operands, place);
}

}  // namespace specdec::simt
