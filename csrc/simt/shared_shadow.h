// What the executor knows about every 4 bytes of a block's shared memory: who wrote and who read last, which
// bytes hold values, and which an asynchronous copy is about to write.
//
// Races are found as in FastTrack (Flanagan and Freund, "FastTrack: Efficient and Precise Dynamic Race
// Detection", 2009), with one clock a warp instead of one a thread: barriers take whole warps, so what the
// lanes of a warp know about other warps is always the same. A warp's epoch is the number of barriers it has
// passed; the access of a thread of warp w in epoch e comes before everything that warp v does once v has
// joined w's clock at e. Within a warp only a barrier orders two lanes.
#pragma once

#include <cstdint>
#include <vector>

namespace specdec::simt {

// The thread that accesses, with its warp's clock.
struct Accessor {
  int thread = 0;
  uint32_t epoch = 0;                // of its warp
  const uint32_t* joined = nullptr;  // by warp: the last epoch that comes before
};

struct Conflict {
  int thread = -1;  // -1: none
  uint32_t place = 0;
  bool write = false;  // what the other one did
};

class SharedShadow {
 public:
  SharedShadow(int64_t bytes, int warps);

  // Forgets which bytes hold values. Epochs of the next block must lie above those of the last.
  void start_block() { ++block_; }

  // Checks an access and remembers it.
  struct Touch {
    Conflict conflict;
    bool pending = false;    // an asynchronous copy to these bytes has been issued and has not landed
    bool unwritten = false;  // not all of the bytes hold values
  };
  Touch read(int64_t offset, int bytes, const Accessor& accessor, uint32_t place) {
    return touch<false>(offset, bytes, accessor, place);
  }
  Touch write(int64_t offset, int bytes, const Accessor& accessor, uint32_t place) {
    return touch<true>(offset, bytes, accessor, place);
  }

  void set_values(int64_t offset, int bytes);
  // Asynchronous copies that have been issued to these bytes, less those that have landed.
  void add_pending(int64_t offset, int bytes, int count);

 private:
  struct Granule {
    uint32_t block = 0;  // for which `values` and `copies` hold
    uint8_t values = 0;  // by byte
    uint8_t copies = 0;
    bool split = false;  // its bytes are tracked apart, since an access of less than 4 bytes came
    int32_t bytes = -1;  // where: the first of four cells
  };
  struct Write {
    uint32_t epoch = 0, place = 0;
    int32_t thread = -1;
  };
  struct Read {  // of one warp
    uint32_t epoch = 0, lanes = 0, place = 0;
  };

  Granule& current(int64_t granule);
  template <bool kWrite>
  Touch touch(int64_t offset, int bytes, const Accessor& accessor, uint32_t place);
  Conflict read_cell(int64_t cell, const Accessor& accessor, uint32_t place);
  Conflict write_cell(int64_t cell, const Accessor& accessor, uint32_t place);
  void split(int64_t granule);

  int warps_;
  uint32_t block_ = 1;
  std::vector<Granule> granules_;
  std::vector<Write> writes_;  // [cells]
  std::vector<Read> reads_;    // [cells, warps]
};

}  // namespace specdec::simt
