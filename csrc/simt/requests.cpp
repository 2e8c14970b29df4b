#include "requests.h"

#include <algorithm>
#include <tuple>

namespace specdec::simt {

namespace {

// Distinct values; sorts them where they do not ascend already.
int sort_distinct(uint64_t* values, int count) {
  for (int i = 1; i < count; ++i) {
    if (values[i] < values[i - 1]) {
      std::sort(values, values + count);
      break;
    }
  }
  int distinct = 0;
  for (int i = 0; i < count; ++i) {
    if (i == 0 || values[i] != values[distinct - 1]) values[distinct++] = values[i];
  }
  return distinct;
}

// Lanes that the hardware serves together: 128 bytes of them.
int lanes_of_request(int bytes) { return bytes <= 4 ? kWarpSize : 128 / bytes; }
uint32_t mask(int lanes) { return ~uint32_t{0} >> (kWarpSize - lanes); }

// Passes over 32 banks of 4 bytes: the most distinct words that one bank has to deliver.
int wavefronts(const uint64_t* addresses, uint32_t active, int bytes) {
  uint64_t at[kWarpSize];
  int count = 0;
  for (int i = 0; i < kWarpSize; ++i) {
    if ((active >> i & 1) != 0) at[count++] = bytes < 4 ? addresses[i] / 4 * 4 : addresses[i];
  }
  count = sort_distinct(at, count);
  // Neighbours lie in different banks, for they are at most 128 bytes.
  if (at[count - 1] - at[0] == static_cast<uint64_t>((count - 1) * std::max(bytes, 4))) return 1;
  int depth[32] = {}, most = 0;
  for (int i = 0; i < count; ++i) {
    for (int byte = 0; byte < bytes; byte += 4) {
      most = std::max(most, ++depth[(at[i] + static_cast<uint64_t>(byte)) / 4 % 32]);
    }
  }
  return most;
}

}  // namespace

uint32_t Places::find(Where where) {
  const auto [entry, added] =
      numbers_.try_emplace({where.file, where.line}, static_cast<uint32_t>(all_.size()));
  if (added) all_.push_back(where);
  slots_[hash(where)] = {where, entry->second};
  return entry->second;
}

void RequestCounter::count(std::vector<AccessRecord>* const (&lanes)[kWarpSize]) {
  const size_t length = lanes[0]->size();
  bool alike = true;
  for (int l = 1; l < kWarpSize && alike; ++l) {
    alike = lanes[l]->size() == length;
    for (size_t i = 0; i < length && alike; ++i) alike = (*lanes[l])[i].key == (*lanes[0])[i].key;
  }
  uint64_t addresses[kWarpSize];
  if (alike) {
    for (size_t i = 0; i < length; ++i) {
      for (int l = 0; l < kWarpSize; ++l) addresses[l] = (*lanes[l])[i].address;
      count_request((*lanes[0])[i].key, addresses, ~uint32_t{0});
    }
  } else {
    stragglers_.clear();
    std::vector<std::pair<uint32_t, uint32_t>> seen;  // key and times, for one lane
    for (int l = 0; l < kWarpSize; ++l) {
      seen.clear();
      for (const AccessRecord& record : *lanes[l]) {
        auto at =
            std::find_if(seen.begin(), seen.end(), [&](const auto& s) { return s.first == record.key; });
        if (at == seen.end()) at = seen.insert(seen.end(), {record.key, 0});
        stragglers_.push_back({record.key, at->second++, l, record.address});
      }
    }
    std::sort(stragglers_.begin(), stragglers_.end(), [](const Straggler& a, const Straggler& b) {
      return std::tie(a.key, a.occurrence) < std::tie(b.key, b.occurrence);
    });
    for (size_t i = 0; i < stragglers_.size();) {
      const Straggler& first = stragglers_[i];
      uint32_t active = 0;
      while (i < stragglers_.size() && stragglers_[i].key == first.key &&
             stragglers_[i].occurrence == first.occurrence) {
        active |= uint32_t{1} << stragglers_[i].lane;
        addresses[stragglers_[i].lane] = stragglers_[i].address;
        ++i;
      }
      count_request(first.key, addresses, active);
    }
  }
  for (auto* lane : lanes) lane->clear();
}

void RequestCounter::count_request(uint32_t key, const uint64_t* addresses, uint32_t active) {
  const uint32_t number = key >> 8;
  const int bytes = 1 << (key >> 4 & 15);
  const auto kind = static_cast<Access>(key & 15);
  if (number >= places.size()) places.resize(number + 1);
  PlaceCounts& place = places[number];
  if (kind == Access::kSharedRead || kind == Access::kSharedWrite) {
    count_shared(place, addresses, active, bytes);
  } else {
    count_global(place, kind == Access::kGlobalWrite, addresses, active, bytes);
  }
}

void RequestCounter::count_global(PlaceCounts& place, bool write, const uint64_t* addresses, uint32_t active,
                                  int bytes) {
  GlobalTraffic& traffic = write ? place.write : place.read;
  const int group = lanes_of_request(bytes);
  for (int first = 0; first < kWarpSize; first += group) {
    if ((active >> first & mask(group)) != 0) ++traffic.requests;
  }
  uint64_t values[kWarpSize];
  int count = 0;
  for (int i = 0; i < kWarpSize; ++i) {
    if ((active >> i & 1) != 0) values[count++] = addresses[i];
  }
  count = sort_distinct(values, count);
  traffic.bytes += static_cast<int64_t>(count) * bytes;
  // Lanes may read different buffers at one source line.
  for (int first = 0, last = 0; first < count; first = last) {
    const Buffer& buffer = *memory_.find(values[first]);
    while (last < count && values[last] < buffer.end()) ++last;
    (write ? buffer.traffic.written : buffer.traffic.read) += static_cast<int64_t>(last - first) * bytes;
    // As if the buffer began where the GPU's allocations begin, at a multiple of 256 bytes.
    for (int i = first; i < last; ++i) values[i] = (values[i] - buffer.begin()) / kSectorBytes;
    const int sectors = sort_distinct(values + first, last - first);
    traffic.sectors += sectors;
    SectorSet& touched = write ? buffer.traffic.sectors_written : buffer.traffic.sectors_read;
    for (int i = 0; i < sectors; ++i) touched.add(values[first + i], buffer.end() - buffer.begin());
  }
}

void RequestCounter::count_shared(PlaceCounts& place, const uint64_t* addresses, uint32_t active, int bytes) {
  const int group = lanes_of_request(bytes);
  for (int first = 0; first < kWarpSize; first += group) {
    const uint32_t part = active >> first & mask(group);
    if (part == 0) continue;
    const int passes = wavefronts(addresses + first, part, bytes);
    place.shared.requests += 1;
    place.shared.wavefronts += passes;
    place.shared.worst = std::max<int64_t>(place.shared.worst, passes);
  }
}

}  // namespace specdec::simt
