#include "report.h"

#include <cstdio>
#include <stdexcept>

namespace specdec::simt {

namespace {

std::string base_name(const std::string& file) { return file.substr(file.find_last_of('/') + 1); }

template <typename... Args>
std::string format(const char* pattern, Args... args) {
  char text[512];
  std::snprintf(text, sizeof(text), pattern, args...);
  return text;
}

long long as_ll(int64_t value) { return value; }

std::string to_string(const char* name, const GlobalTraffic& traffic) {
  return format("  %s: %lld bytes, %lld requests, %lld sectors (%.2f a request)\n", name,
                as_ll(traffic.bytes), as_ll(traffic.requests), as_ll(traffic.sectors),
                traffic.sectors_per_request());
}

}  // namespace

const char* name_of(FindingKind kind) {
  switch (kind) {
    case FindingKind::kRace:
      return "race";
    case FindingKind::kOutOfBounds:
      return "out of bounds";
    case FindingKind::kMisaligned:
      return "misaligned";
    case FindingKind::kUninitialized:
      return "uninitialized";
    case FindingKind::kReadOnly:
      return "read-only";
    case FindingKind::kAsyncNotWaited:
      return "asynchronous copy not waited for";
    case FindingKind::kBarrier:
      return "barrier";
    case FindingKind::kAbsentLanes:
      return "absent lanes";
    case FindingKind::kDeadlock:
      return "deadlock";
  }
  return "?";
}

std::string Finding::to_string() const {
  std::string result = format("%s:%d: %s: %s\n", base_name(file).c_str(), line, name_of(kind), text.c_str());
  result +=
      format("    in %s, block (%d, %d, %d), thread %d", kernel.c_str(), block.x, block.y, block.z, thread);
  if (other_thread >= 0) result += format(", against thread %d at line %d", other_thread, other_line);
  if (count > 1) result += format(" (%lld times)", as_ll(count));
  return result + "\n";
}

const KernelCounts& Report::kernel(const std::string& part_of_name) const {
  for (const KernelCounts& counts : kernels) {
    if (counts.kernel.find(part_of_name) != std::string::npos) return counts;
  }
  throw std::out_of_range("simt: no kernel ran that is called " + part_of_name);
}

int64_t Report::count(FindingKind kind) const {
  int64_t result = 0;
  for (const Finding& finding : findings) result += finding.kind == kind ? 1 : 0;
  return result;
}

std::string Report::to_string() const {
  std::string result;
  for (const Finding& finding : findings) result += finding.to_string();
  if (findings_dropped) result += "more findings were dropped\n";
  for (const KernelCounts& k : kernels) {
    result += format("%s: %lld launches, %lld blocks, %lld bytes of shared memory\n", k.kernel.c_str(),
                     as_ll(k.launches), as_ll(k.blocks), as_ll(k.shared_bytes));
    result += simt::to_string("read", k.read);
    result += simt::to_string("written", k.write);
    result += format("  footprint: %lld bytes read, %lld written\n", as_ll(k.footprint_read),
                     as_ll(k.footprint_written));
    result += format("  shared: %lld requests, %lld wavefronts, worst %lld-way\n", as_ll(k.shared.requests),
                     as_ll(k.shared.wavefronts), as_ll(k.shared.worst));
    result +=
        format("  %lld bytes copied asynchronously, %lld flag accesses, %lld barriers, %lld warp barriers\n",
               as_ll(k.async_bytes), as_ll(k.flag_accesses), as_ll(k.barriers), as_ll(k.warp_barriers));
    result += format("  %lld shuffles, %lld votes, %lld mma tf32, %lld mma bf16, %lld load_matrix\n",
                     as_ll(k.shuffles), as_ll(k.votes), as_ll(k.mma_tf32), as_ll(k.mma_bf16),
                     as_ll(k.load_matrices));
    for (const BufferCounts& b : k.buffers) {
      if (b.bytes_read == 0 && b.bytes_written == 0) continue;
      result += format("  %s: %lld bytes read, %lld written; footprint %lld read, %lld written\n",
                       b.name.c_str(), as_ll(b.bytes_read), as_ll(b.bytes_written), as_ll(b.footprint_read),
                       as_ll(b.footprint_written));
    }
    for (const LineCounts& l : k.lines) {
      result += format("  %s:%d:", base_name(l.file).c_str(), l.line);
      if (l.read.requests > 0) {
        result += format(" reads %lld bytes at %.2f sectors a request", as_ll(l.read.bytes),
                         l.read.sectors_per_request());
      }
      if (l.write.requests > 0) {
        result += format(" writes %lld bytes at %.2f sectors a request", as_ll(l.write.bytes),
                         l.write.sectors_per_request());
      }
      if (l.shared.requests > 0) {
        result += format(" shared %.2f wavefronts a request, worst %lld",
                         static_cast<double>(l.shared.wavefronts) / static_cast<double>(l.shared.requests),
                         as_ll(l.shared.worst));
      }
      result += "\n";
    }
  }
  return result;
}

}  // namespace specdec::simt
