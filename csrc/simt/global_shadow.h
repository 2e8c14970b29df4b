// Who wrote and who read every 4 bytes of a buffer last, in the launch that runs. Races are found as in
// shared memory; of several readers only the last is remembered, and of the writers of a word's parts the
// last, so a race can go unseen, but what is found is one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "order.h"
#include "reservation.h"
#include "shared_shadow.h"

namespace specdec::simt {

struct GlobalAccessor {
  uint32_t launch = 0;
  int64_t block = 0;  // of the grid
  Accessor in_block;
  const KnowledgePtr* known = nullptr;  // of other blocks
};

struct GlobalConflict : Conflict {
  bool same_block = false;
};

class GlobalShadow {
 public:
  GlobalConflict read(size_t offset, int bytes, size_t buffer_bytes, const GlobalAccessor& accessor,
                      uint32_t place);
  GlobalConflict write(size_t offset, int bytes, size_t buffer_bytes, const GlobalAccessor& accessor,
                       uint32_t place);

 private:
  struct Access {
    uint32_t launch, epoch, block;
    uint32_t thread : 10, bytes : 4, place : 18;
  };
  struct Granule {
    Access write, read;
  };

  static void check(GlobalConflict& conflict, const Access& other, bool write, uint32_t mask,
                    const GlobalAccessor& accessor);
  template <bool kWrite>
  GlobalConflict touch(size_t offset, int bytes, size_t buffer_bytes, const GlobalAccessor& accessor,
                       uint32_t place);

  Reservation granules_;  // zeros: launch 0, which is none
};

}  // namespace specdec::simt
