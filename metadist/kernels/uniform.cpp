// Uniform random numbers of many keys: for each row of words the first doubles of
// numpy.random.default_rng(row).random(), bit for bit. NumPy guarantees the algorithm of
// SeedSequence (Melissa O'Neill's seed_seq replacement) and the seeding of PCG64 (NEP 19).

#include <cstdint>

namespace {

constexpr int WORDS = 4;  // of a key, and of SeedSequence's pool

struct Hash {
    uint32_t constant, factor;
    uint32_t operator()(uint32_t word) {
        word ^= constant;
        constant *= factor;
        word *= constant;
        return word ^ (word >> 16);
    }
};

uint32_t mix(uint32_t x, uint32_t y) {
    const uint32_t mixed = 0xCA01F9DDu * x - 0x4973F715u * y;
    return mixed ^ (mixed >> 16);
}

using Wide = unsigned __int128;

class PCG64 {
   public:
    explicit PCG64(const uint32_t* key) {
        uint32_t pool[WORDS];
        Hash absorb{0x43B0D7E5u, 0x931E8875u};
        for (int i = 0; i < WORDS; ++i) pool[i] = absorb(key[i]);
        for (int from = 0; from < WORDS; ++from)
            for (int to = 0; to < WORDS; ++to)
                if (from != to) pool[to] = mix(pool[to], absorb(pool[from]));
        Hash draw{0x8B51F9DDu, 0x58F38DEDu};
        uint64_t words[WORDS];
        for (int i = 0; i < WORDS; ++i) {
            const uint64_t low = draw(pool[2 * i % WORDS]);
            words[i] = low | static_cast<uint64_t>(draw(pool[(2 * i + 1) % WORDS])) << 32;
        }
        increment = wide(words[2], words[3]) << 1 | 1;
        state = increment + wide(words[0], words[1]);
        step();
    }

    double uniform() {
        step();
        const uint64_t folded = static_cast<uint64_t>(state >> 64) ^ static_cast<uint64_t>(state);
        const int turn = static_cast<int>(state >> 122);
        const uint64_t number = folded >> turn | folded << (-turn & 63);
        return static_cast<double>(number >> 11) * (1.0 / 9007199254740992.0);
    }

   private:
    static Wide wide(uint64_t high, uint64_t low) { return static_cast<Wide>(high) << 64 | low; }
    void step() { state = state * wide(0x2360ED051FC65DA4u, 0x4385DF649FCCF645u) + increment; }

    Wide state, increment;
};

}  // namespace

extern "C" void uniform(int64_t keys, int64_t count, const uint32_t* key, double* numbers) {
    for (; keys > 0; --keys, key += WORDS) {
        PCG64 generator(key);
        for (int64_t i = 0; i < count; ++i) *numbers++ = generator.uniform();
    }
}
