// In the place of kernels/access.cuh, which is PTX: accesses of devices that fibers.h runs.
#pragma once
#include "common.cuh"

#ifdef PLAIN_IS_SHARED
// A GPU faults on such an access.
inline void require_aligned(u64 at, u64 bytes) {
    if (at % bytes == 0) return;
    printf("wrong: an access of %d bytes at an address that is not aligned\n", (int)bytes);
    fflush(stdout);
    _exit(1);
}

// Memory that other devices know, between two meetings: in pieces that come when they come.
template <class Unit> inline Unit load(u64 at) {
    require_aligned(at, sizeof(Unit));
    Unit x;
    for (u64 k = 0; k < sizeof(Unit); k += 8) {
        const u64 bytes = sizeof(Unit) < 8 ? sizeof(Unit) : 8, piece = seen(at + k, bytes);
        memcpy((char*)&x + k, &piece, bytes);
    }
    return x;
}
template <class Unit> inline void store(u64 at, Unit x) {
    require_aligned(at, sizeof(Unit));
    for (u64 k = 0; k < sizeof(Unit); k += 8) {
        const u64 bytes = sizeof(Unit) < 8 ? sizeof(Unit) : 8;
        u64 piece = 0;
        memcpy(&piece, (const char*)&x + k, bytes);
        send(at + k, bytes, piece, false);
    }
}
#else
// Memory that no other device knows.
template <class Unit> inline Unit load(u64 at) { return *(const Unit*)at; }
template <class Unit> inline void store(u64 at, Unit x) { *(Unit*)at = x; }
#endif

inline void prefetch(u64) {}

template <class Word> inline Word load_relaxed(const Word* at) {
    here->pause();
    return (Word)seen((u64)at, sizeof(Word));
}
template <class Word> inline Word load_acquire(const Word* at) { return (Word)seen((u64)at, sizeof(Word)); }
template <class Word> inline void store_release(Word* at, std::type_identity_t<Word> x) {
    send((u64)at, sizeof(Word), x, true);
    pause_sometimes();
}
template <class Word> inline void store_relaxed(Word* at, std::type_identity_t<Word> x) {
    send((u64)at, sizeof(Word), x, false);
}

// In pieces, each of which others see when it comes.
inline uint4 load_packet(u64 at) {
    here->pause();
    u32 word[4];
    for (u32 k = 0; k < 4; k++) word[k] = (u32)seen(at + 4 * k, 4);
    return make_uint4(word[0], word[1], word[2], word[3]);
}
// A unit of an inbox: what is full of the reserved word empties a place of it.
inline void count_unit(uint4 x) {
    const bool empties = (x.x & x.y & x.z & x.w) == ~0u;
    (empties ? counted.taken : counted.sent)[here->device]++;
}
inline void store_packet(u64 at, uint4 x) {
    count_unit(x);
    const u32 word[4] = {x.x, x.y, x.z, x.w};
    for (u32 k = 0; k < 4; k++) send(at + 4 * k, 4, word[k], false);
    pause_sometimes();
}
inline uint4 load_halves(u64 at) {
    here->pause();
    const u64 low = seen(at, 8), high = seen(at + 8, 8);
    return make_uint4((u32)low, (u32)(low >> 32), (u32)high, (u32)(high >> 32));
}
inline void store_halves(u64 at, uint4 x) {
    count_unit(x);
    send(at, 8, (u64)x.y << 32 | x.x, false);
    send(at + 8, 8, (u64)x.w << 32 | x.z, false);
    pause_sometimes();
}

inline void await_earlier() {}
inline void let_next_come() {}
inline void settle(u64&) {}
inline void settle(u32&) {}
inline u64 nanoseconds() {
    static u64 now = 0;
    return ++now;
}
