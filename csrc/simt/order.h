// What comes before what between blocks. Flags carry it: a release publishes what its thread knows, an
// acquire of that flag learns it, and barriers hand it on within a block. An atomic_add publishes what was
// known at the thread's last fence(), and what it learns holds after the next one.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace specdec::simt {

// What is known of one block: the barriers that its warps had passed, and threads that published in between.
struct BlockClock {
  std::vector<uint32_t> joined;     // by warp, see Accessor
  std::map<int, uint32_t> threads;  // epochs
};

using Knowledge = std::map<int64_t, BlockClock>;  // by block of the grid
using KnowledgePtr = std::shared_ptr<const Knowledge>;

KnowledgePtr merged(const KnowledgePtr& a, const KnowledgePtr& b);
bool knows(const KnowledgePtr& knowledge, int64_t block, int thread, uint32_t epoch);

}  // namespace specdec::simt
