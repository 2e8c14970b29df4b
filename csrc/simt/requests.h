// The accesses of a warp's lanes, put together into the requests that the hardware would see.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "memory.h"
#include "report.h"
#include "where.h"

namespace specdec::simt {

constexpr int kWarpSize = 32;

enum class Access : uint32_t { kGlobalRead, kGlobalWrite, kSharedRead, kSharedWrite };

// One access of one lane, remembered until all lanes of the warp have come as far.
struct AccessRecord {
  uint64_t address;  // in shared memory an offset
  uint32_t key;      // place << 8 | log2(bytes) << 4 | kind: what the lanes of a request have in common
};

// Numbers the places in the source. A place keeps its number for the life of the table.
class Places {
 public:
  Places() : slots_(1024) {}
  uint32_t number(Where where) {
    const Slot& slot = slots_[hash(where)];
    if (slot.where.file == where.file && slot.where.line == where.line) return slot.number;
    return find(where);
  }
  Where where(uint32_t number) const { return all_[number]; }
  size_t size() const { return all_.size(); }

 private:
  struct Slot {
    Where where{nullptr, 0};
    uint32_t number = 0;
  };
  size_t hash(Where where) const {
    return (reinterpret_cast<uintptr_t>(where.file) * 31 + static_cast<size_t>(where.line)) % slots_.size();
  }
  uint32_t find(Where where);

  std::vector<Slot> slots_;  // a cache; what it does not hold is in numbers_
  std::map<std::pair<const char*, int>, uint32_t> numbers_;
  std::vector<Where> all_;
};

class RequestCounter {
 public:
  struct PlaceCounts {
    GlobalTraffic read, write;
    SharedTraffic shared;
  };

  explicit RequestCounter(Memory& memory) : memory_(memory) {}

  // The lanes' accesses since the last call; the n-th access of a lane at a place belongs to the n-th of the
  // others. Empties the records.
  void count(std::vector<AccessRecord>* const (&lanes)[kWarpSize]);

  std::vector<PlaceCounts> places;  // by number

 private:
  // Addresses by lane; of the lanes in `active` only.
  void count_request(uint32_t key, const uint64_t* addresses, uint32_t active);
  void count_global(PlaceCounts& place, bool write, const uint64_t* addresses, uint32_t active, int bytes);
  void count_shared(PlaceCounts& place, const uint64_t* addresses, uint32_t active, int bytes);

  Memory& memory_;
  struct Straggler {
    uint32_t key, occurrence;
    int lane;
    uint64_t address;
  };
  std::vector<Straggler> stragglers_;
};

}  // namespace specdec::simt
