// linear: y = x W^T + bias with the same bits for a row whatever the number of rows, its position and the
// threads. A panel of 32 outputs stays in cache while the rows pass over it in tiles; threads take panels,
// and blocks of rows too where there are few panels.
#include <utility>

#include "linear_tile.h"
#include "ops.h"
#include "parallel.h"
#include "row_ops.h"
#include "scratch.h"

namespace specdec::cpu::SPECDEC_ISA {

namespace {

constexpr int64_t kBlockFloats = 1 << 17;  // packed x of a block: half a megabyte, a part of the second cache

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <typename W>
using TileFunction = void (*)(const float*, const W*, int64_t, int64_t, int64_t, const TileOutput&);

template <typename W, int... I>
TileFunction<W> tile_function(int64_t rows, std::integer_sequence<int, I...>) {
  static constexpr TileFunction<W> table[] = {&tile_slices<W, I + 1>...};
  return table[rows - 1];
}

// One row of x as float32 [K], after what LinearInput asks for.
template <typename X>
void read_row(const LinearParams& p, int64_t row, float* to) {
  const X* x = row_of<X>(p.x, row);
  switch (p.input) {
    case LinearInput::kPlain:
      for_vectors(p.K, [&](int64_t i, int64_t n) { store_some(to + i, load_some(x + i, n), n); });
      return;
    case LinearInput::kRmsNorm: {
      const X* gate = p.has_gate ? row_of<X>(p.gate, row) : nullptr;
      for (int64_t i = 0; i < p.K; i += p.norm_size) {
        const X* group_gate = gate != nullptr ? gate + i : nullptr;
        rms_norm_row(x + i, group_gate, p.norm_weight, p.norm_eps, p.norm_size, to + i);
      }
      return;
    }
    case LinearInput::kSwiglu:
      swiglu_row(x, p.K, to);
      return;
  }
}

// Rows [begin, begin + count) of x to one float32 tile, see kChunk. `row` is room for one row.
template <typename X>
void pack_tile(const LinearParams& p, int64_t begin, int64_t count, float* tile, float* row) {
  for (int64_t r = 0; r < count; ++r) {
    float* const first = tile + r * kChunkStride;
    if (p.K <= kChunk) {
      read_row<X>(p, begin + r, first);
      continue;
    }
    read_row<X>(p, begin + r, row);
    for (int64_t done = 0; done < p.K; done += kChunk) {
      std::memcpy(first + done / kChunk * count * kChunkStride, row + done,
                  std::min(kChunk, p.K - done) * sizeof(float));
    }
  }
}

// Rows [row_begin, row_end) times panels [panel_begin, panel_end).
template <typename X, typename W>
void block(const LinearParams& p, int64_t row_begin, int64_t row_end, int64_t panel_begin,
           int64_t panel_end) {
  constexpr bool direct = sizeof(X) == sizeof(float);               // results are float32 already
  const int64_t row_floats = ceil_div(p.K, kChunk) * kChunkStride;  // K is at least 1
  const int64_t column_begin = panel_begin * kPanelWidth;
  const int64_t columns = std::min(p.N, panel_end * kPanelWidth) - column_begin;
  const int64_t most_rows =
      std::max<int64_t>(1, kBlockFloats / (row_floats * kMaxRows)) * kMaxRows;  // of a block, whole tiles
  const int64_t block_rows = std::min(most_rows, row_end - row_begin);
  float* packed = thread_scratch(block_rows * row_floats + p.K + (direct ? 0 : block_rows * columns));
  float* row = packed + block_rows * row_floats;  // [K]
  float* staged = row + p.K;                      // [block_rows, columns]
  const X* residual = static_cast<const X*>(p.residual);
  const W* weight = static_cast<const W*>(p.weight);
  X* const y = static_cast<X*>(p.y);

  for (int64_t first = row_begin; first < row_end; first += block_rows) {
    const int64_t rows = std::min(block_rows, row_end - first);
    const int64_t tiles = ceil_div(rows, kMaxRows);  // of equal size, or one row less
    const auto tile_begin = [&](int64_t t) { return rows * t / tiles; };
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t begin = tile_begin(t);
      pack_tile<X>(p, first + begin, tile_begin(t + 1) - begin, packed + begin * row_floats, row);
    }
    TileOutput out{staged - column_begin, columns, p.N, p.bias, nullptr};
    if constexpr (direct) {
      out = {y + first * p.N, p.N, p.N, p.bias, residual != nullptr ? residual + first * p.N : nullptr};
    }
    const int64_t slices = (panel_end - panel_begin) * kSlices;
    const int64_t step = tiles == 1 ? slices : 1;  // one tile streams the weights; several share each slice
    for (int64_t s = 0; s < slices; s += step) {
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t begin = tile_begin(t);
        TileOutput tile_out = out;
        tile_out.y += begin * out.stride;
        if (tile_out.residual != nullptr) tile_out.residual += begin * out.stride;
        const auto run =
            tile_function<W>(tile_begin(t + 1) - begin, std::make_integer_sequence<int, kMaxRows>());
        const int64_t slice = panel_begin * kSlices + s;
        run(packed + begin * row_floats, weight, p.K, slice, slice + step, tile_out);
      }
    }
    if constexpr (!direct) {
      for (int64_t r = 0; r < rows; ++r) {
        const float* from = staged + r * columns;
        const int64_t at = (first + r) * p.N + column_begin;
        for_vectors(columns, [&](int64_t i, int64_t n) {
          Vec sum = load_some(from + i, n);
          if (residual != nullptr) sum = sum + load_some(residual + at + i, n);
          store_some(y + at + i, sum, n);
        });
      }
    }
  }
}

}  // namespace

Status linear(const LinearParams& p) {
  const int64_t panels = ceil_div(p.N, kPanelWidth);
  const int64_t rows = p.x.rows;
  if (rows == 0 || panels == 0) return Status::kOk;
  const int64_t work = rows * p.N * p.K;
  const int64_t threads = work >= kParallelWork ? max_threads() : 1;
  const int64_t columns_of_blocks = std::min(panels, threads);
  const int64_t rows_of_blocks = std::min(ceil_div(rows, kMaxRows), ceil_div(threads, columns_of_blocks));
  return visit_dtype(p.x.dtype, [&](auto x_tag) {
    using X = decltype(x_tag);
    parallel_for(columns_of_blocks * rows_of_blocks, work, [&](int64_t i) {
      const int64_t c = i % columns_of_blocks, r = i / columns_of_blocks;
      const int64_t row_begin = rows * r / rows_of_blocks, row_end = rows * (r + 1) / rows_of_blocks;
      const int64_t panel_begin = panels * c / columns_of_blocks,
                    panel_end = panels * (c + 1) / columns_of_blocks;
      switch (p.weight_type) {
        case WeightType::kFloat32:
          return block<X, float>(p, row_begin, row_end, panel_begin, panel_end);
        case WeightType::kBFloat16:
          return block<X, bf16>(p, row_begin, row_end, panel_begin, panel_end);
        case WeightType::kInt8:
          return block<X, int8_t>(p, row_begin, row_end, panel_begin, panel_end);
      }
    });
    return Status::kOk;
  });
}

}  // namespace specdec::cpu::SPECDEC_ISA
