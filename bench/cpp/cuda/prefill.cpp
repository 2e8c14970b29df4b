// prefill/HEADS/B/T: T tokens of B sequences, the state read and advanced.
#include "layers.h"

namespace specdec::bench {

void add_prefill() {
  for (const Heads& heads : {kQwen, kSpecLA}) {
    for (const int64_t B : {1, 8}) {
      for (const int64_t T : {64, 512, 4096}) {
        add(std::string("prefill/") + heads.name + "/B:" + std::to_string(B) + "/T:" + std::to_string(T),
            [=]() -> Result {
              const Layers layers(heads, B, T, 1);
              if (layers.sets() <= 0) return {{-1.0, kTooSmall}};
              const Time time = checked(layers, layers.prefill(0), [&](int64_t set, cudaStream_t s) {
                return cuda::prefill(layers.prefill(set), s);
              });
              return {time, layers.prefill_bytes(), steps(heads, B, T)};
            });
      }
    }
  }
}

}  // namespace specdec::bench
