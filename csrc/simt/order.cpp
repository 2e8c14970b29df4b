#include "order.h"

#include <algorithm>

namespace specdec::simt {

KnowledgePtr merged(const KnowledgePtr& a, const KnowledgePtr& b) {
  if (b == nullptr || a == b) return a;
  if (a == nullptr) return b;
  auto result = std::make_shared<Knowledge>(*a);
  for (const auto& [block, from] : *b) {
    BlockClock& to = (*result)[block];
    to.joined.resize(from.joined.size());
    for (size_t w = 0; w < from.joined.size(); ++w) to.joined[w] = std::max(to.joined[w], from.joined[w]);
    for (const auto& [thread, epoch] : from.threads) {
      uint32_t& known = to.threads[thread];
      known = std::max(known, epoch);
    }
  }
  return result;
}

bool knows(const KnowledgePtr& knowledge, int64_t block, int thread, uint32_t epoch) {
  if (knowledge == nullptr) return false;
  const auto clock = knowledge->find(block);
  if (clock == knowledge->end()) return false;
  if (epoch <= clock->second.joined[static_cast<size_t>(thread / 32)]) return true;
  const auto published = clock->second.threads.find(thread);
  return published != clock->second.threads.end() && epoch <= published->second;
}

}  // namespace specdec::simt
