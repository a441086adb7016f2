// Device barriers: how the kernels of one collective, one on each device of a gang, wait for each other ("meet"). They
// use flags and packets in each other's memory, or in page-locked host memory for devices without peer access.
//
// Every device has one `Signals` (its signal pad). If host memory is used, it has two. The kernels get the one in the
// device's own memory (atomic additions over PCIe do not work on every machine), for the addresses, the epochs and the
// ticket. `peer` names the one in host memory, for the words that others write. Two devices meet in the same order on
// both sides, in kernels with equal grids, one at a time on each device. So both count equal epochs for their pair
// without communication. A meeting in which every member waits for every other one adds one to the epochs of all its
// pairs.
//
// A waiting kernel checks an abort word and a deadline. Then it gives up, reports the missing member, and ends. The
// contents of the gang's buffers are unspecified after that. The epochs are counted in this case, too. For a member
// whose kernel never ran, the host launches a kernel after the gang has failed: it counts, finds the abort word and
// ends.
//
// Kernels run one at a time, although the next one may already be on the device (`await_earlier`; build.py checks that
// every entry waits first of all). Take a chain A, B, C on one stream: C waits until B has completed, and B completes
// after it has waited for A, since all its threads wait, also those without work. So when C continues, A has completed,
// and there are never more than two kernels of a stream on the device. (B may be a user's kernel, on cudarc's handle of
// the stream: if it is launched early, it must wait, too. src/interop.rs states this.)
//
// The resources that C occupies while it waits must not block work that B waits for. Blocks of B: all of them are on
// the device, or C would not be. Peers' kernels on a shared GPU: there are no early launches on shared GPUs. Other work
// of this device that a peer's kernel depends on: a kernel with barriers calls `let_next_come` after its block has
// passed the start, so all peers' kernels are running; a push kernel with many blocks after its block has taken
// something from all peers, or never. A push kernel with few blocks (`FEW`) calls it while it may still wait for peers;
// behind one of those only kernels that leave a quarter of the multiprocessors free beside it are launched early. (A
// block of either kernel takes most of a multiprocessor's registers.)
#pragma once
#include "access.cuh"

const u32 MOST = 16;      // devices
const u32 BLOCKS = 128;   // blocks of a kernel that meets, at most
const u32 STAGED = 64;    // and of one that goes through the host's memory
const u32 FEW = 32;       // and of one that waits for its peers while the next one is on the device

// The signals of a block. In staged.cu: pieces that it has put on its stage, has used, has taken (on separate cache
// lines). In ring.cu and exchange.cu: pieces that it has put into a peer's inbox, and has taken out of its own. In
// inbox.cuh: steps whose pieces it has used. (Not TAKEN: a member may tell it before others have ended an exchange.)
enum Step : u32 { PUT, DONE, TAKEN };

// In the device's memory, aligned to 256 bytes; zeroed except for the addresses. The Rust side (search for `Signals`)
// has the same layout.
struct Signals {
    u64 peer[MOST];                  // addresses of every device's Signals, by ordinal in the pool, own included
    u64 abort;                       // address of two u64 of the host: gangs up to this place have failed; the place of
                                     // the gang whose graphs run on this device
    u64 report;                      // address of a u64 of the host, this device's own: see `Patience`
    u32 epoch[MOST];                 // by ordinal: the last meeting with that device
    u32 ticket;                      // blocks of the running kernel that have read the epochs
    u32 packets;                     // of each sender and parity
    u32 room;                        // bytes of the room of each sender and parity,
    u32 rooms;                       // and from the first packet to the first room
    u32 wholes, whole;               // as `rooms` and `room`, of data that are their own flags: inbox.cuh
    u32 slots, slot;                 // bytes from the first packet to the first slot, and of a slot
    u32 pad[4];
    u32 flag[2][BLOCKS][MOST];       // [start, end][block][ordinal of the sender]: the epoch
    u64 step[3][BLOCKS][MOST];       // [`Step`][block][ordinal of the sender]: the epoch, and below it how many
};
static_assert(sizeof(Signals) == 256 + 2 * BLOCKS * MOST * 4 + 3 * BLOCKS * MOST * 8, "as the host lays it out");

// An entry; all have at most 512 threads a block, and so up to 128 registers a thread.
#define KERNEL extern "C" __global__ void __launch_bounds__(512, 1)

// Defines the entries of all element types.
#define EACH_TYPE(ENTRY) \
    ENTRY(f32) ENTRY(f64) ENTRY(f16) ENTRY(bf16) ENTRY(i8) ENTRY(u8) ENTRY(i32) ENTRY(u32) ENTRY(i64) ENTRY(u64)

// One value per member, in two parameters: for ranks up to 7, and for the others. (The host passes at most 64 bytes.)
struct Eight {
    u64 x[8];
};
__device__ inline void spread(u64 (&to)[MOST], const Eight& lo, const Eight& hi) {
#pragma unroll
    for (u32 k = 0; k < 8; k++) {
        to[k] = lo.x[k];
        to[8 + k] = hi.x[k];
    }
}

// The meeting of a kernel, passed by value.
struct Meet {
    Signals* signals; // null: no meeting, events order the kernel: no barrier, no epoch, nothing read
    u64 members;      // 4 bits each: ordinals in rank order
    u64 place;        // the gang's number: an abort word >= `place` means failure; 0: the kernel is in a graph, whose
                      // launches may belong to different gangs; the word behind the abort word has the number
    u64 deadline;     // nanoseconds of waiting in one place after which the kernel gives up; 0: never
    u32 count, me;    // members, own rank
    u64 spare;
};

__device__ inline u32 ordinal(const Meet& meet, u32 rank) { return (u32)(meet.members >> (4 * rank)) & 15u; }

// The next epoch. Never 0, the value of memory that was not written yet; and 2 after the last one, so that parities
// still alternate.
__device__ inline u32 following(u32 epoch) { return epoch == ~0u ? 2u : epoch + 1; }

// The pad that receives a member's flags and packets, also for the own rank.
__device__ inline Signals* signals_of(const Meet& meet, u32 rank) {
    return (Signals*)meet.signals->peer[ordinal(meet, rank)];
}

// Behind a device's signals are receive buffers for the other members, [sender][parity of the epoch], by rank; there is
// none for the device itself. First the buffers of packets ({data, epoch, data, epoch} each, `packets` in a buffer),
// then rooms for plain data, then the inboxes of inbox.cuh.
__device__ inline u64 place_of(const Meet& meet, u32 sender, u32 receiver, u32 epoch, u64 rooms, u64 bytes) {
    const u32 from = ordinal(meet, sender), to = ordinal(meet, receiver);
    const u32 place = 2 * (from < to ? from : from - 1) + (epoch & 1);
    return (u64)(signals_of(meet, receiver) + 1) + rooms + place * bytes;
}
__device__ inline u64 packets(const Meet& meet, u32 sender, u32 receiver, u32 epoch) {
    return place_of(meet, sender, receiver, epoch, 0, meet.signals->packets * sizeof(uint4));
}
__device__ inline u64 room(const Meet& meet, u32 sender, u32 receiver, u32 epoch) {
    return place_of(meet, sender, receiver, epoch, meet.signals->rooms, meet.signals->room);
}

// The wait of one thread at one point.
struct Patience {
    u32 polls = 0;
    u64 since = 0;

    // Call it after every failed poll. It reads the abort word only every 1024th time, since the word is at the other
    // end of the PCIe bus. After true, the host can read the missing member.
    __device__ bool over(const Meet& meet, u32 missing) {
        if (++polls % 1024 != 0) return false;
        u64 now = nanoseconds();
        if (since == 0) since = now;
        bool late = meet.deadline != 0 && now - since > meet.deadline;
        const u64* words = (const u64*)meet.signals->abort;
        const u64 place = meet.place != 0 ? meet.place : load_relaxed(words + 1);
        if (!late && load_relaxed(words) < place) return false;
        store_relaxed((u64*)meet.signals->report, place << 8 | 0x80u | missing);
        return true;
    }
};

// The epoch of this meeting for the pair with member `rank`.
__device__ inline u32 epoch_with(const Meet& meet, u32 rank) {
    return following(load_relaxed(&meet.signals->epoch[ordinal(meet, rank)]));
}

// One thread of each block calls this after all threads of the block have read the epochs, and gives the result to
// `note_epochs` at the end: nothing stalls for it in between.
__device__ inline u32 take_ticket(const Meet& meet) { return atomicAdd(&meet.signals->ticket, 1u); }

// The block with the last ticket writes the epochs, `epoch[rank]`, for the next kernel: all blocks have read the old
// ones. (No fence is needed: the old values have passed through shared memory and a barrier before the ticket was
// taken, so the reads are complete.)
__device__ inline void note_epochs(const Meet& meet, u32 ticket, const u32* epoch) {
    if (ticket != gridDim.x - 1) return;
    meet.signals->ticket = 0;
#pragma unroll 1
    for (u32 rank = 0; rank < meet.count; rank++) {
        if (rank != meet.me) meet.signals->epoch[ordinal(meet, rank)] = epoch[rank];
    }
}

// The flags of a block that others wait for; a kernel without barriers uses the first.
enum Which { START, END };

// Thread `rank` signals member `rank` that the block's work before the last __syncthreads is complete. One thread's
// release covers it (https://docs.nvidia.com/cuda/parallel-thread-execution/index.html#causality-order).
__device__ inline void tell(const Meet& meet, Which which, const u32* epoch) {
    const u32 rank = threadIdx.x;
    if (rank >= meet.count || rank == meet.me) return;
    store_release(&signals_of(meet, rank)->flag[which][blockIdx.x][ordinal(meet, meet.me)], epoch[rank]);
}

// Thread `rank` tells member `rank` that this kernel runs. Relaxed: the kernel has written nothing yet, and the work of
// this device's earlier kernels was visible to all when it began. So do the first barriers of NCCL's symmetric kernels
// and of PyTorch ("Pattern 0" in CUDASymmetricMemory-inl.h). A release waits for the traffic of the whole
// multiprocessor: it takes 1.6 us on an H100.
__device__ inline void arrive(const Meet& meet, const u32* epoch) {
    const u32 rank = threadIdx.x;
    if (rank >= meet.count || rank == meet.me) return;
    store_relaxed(&signals_of(meet, rank)->flag[START][blockIdx.x][ordinal(meet, meet.me)], epoch[rank]);
}

// Thread `rank` waits for member `rank`. False if it gave up.
//
// The comparison is "equal", not "at least": a flag from 2^31 epochs ago, or one that was never written, must not look
// newer. `ahead`: the peer may already be in its next meeting and have signalled that, which covers its work in this
// one. It is not two meetings ahead, since for that it needs this device's kernel of the next meeting.
__device__ inline bool hear(const Meet& meet, Which which, const u32* epoch, bool ahead) {
    const u32 rank = threadIdx.x;
    if (rank >= meet.count || rank == meet.me) return true;
    const u32 other = ordinal(meet, rank);
    const u32 expected = epoch[rank];
    const u32* mine = &signals_of(meet, meet.me)->flag[which][blockIdx.x][other];
    Patience patience;
#pragma unroll 1
    for (;;) {
        const u32 seen = load_relaxed(mine);
        if (seen == expected || (ahead && seen == following(expected))) break;
        if (patience.over(meet, other)) return false;
    }
    load_acquire(mine);
    return true;
}

// For a block that gave up at the start, whose memory may be freed: withdraws its flag. A peer's kernel that still runs
// must not believe that this block takes part; it then waits, and finds that the gang has failed.
__device__ inline void withdraw(const Meet& meet) {
    const u32 rank = threadIdx.x;
    if (rank >= meet.count || rank == meet.me) return;
    store_release(&signals_of(meet, rank)->flag[START][blockIdx.x][ordinal(meet, meet.me)], 0);
}

// Blocks of the same index on all members wait for each other, before and after their work. All threads of a block
// call all functions, in the order written here; a block has more than MOST threads.
class Barrier {
    const Meet& meet;
    u32* epoch; // shared, by rank
    u32 ticket = ~0u;

  public:
    // Whether the block may work. Then the members' earlier kernels have completed.
    __device__ bool start() {
        if (!meet.signals) return true;
        // No peer is ahead: to continue it needs this block's next flag, or data that depend on it.
        if (__syncthreads_and(hear(meet, START, epoch, false))) return true;
        withdraw(meet);
        return false;
    }

    // `epoch` has room for MOST numbers in shared memory. Tells the others that the block is here. Includes a
    // __syncthreads. Before it, no thread touches global memory.
    __device__ Barrier(const Meet& meet, u32* epoch) : meet(meet), epoch(epoch) {
        await_earlier();
        if (meet.signals && threadIdx.x < meet.count) {
            epoch[threadIdx.x] = epoch_with(meet, threadIdx.x);
            arrive(meet, epoch);
        }
        __syncthreads();
        // A thread that does not poll.
        if (meet.signals && threadIdx.x == blockDim.x - 1) ticket = take_ticket(meet);
    }

    // After the work. The members' writes of this block are visible to the kernels after this one.
    __device__ void end() {
        if (!meet.signals) return;
        __syncthreads();
        let_next_come();
        tell(meet, END, epoch);
        hear(meet, END, epoch, false);
    }

    // Last, also when the block could not start.
    __device__ void leave() {
        if (meet.signals && threadIdx.x == blockDim.x - 1) note_epochs(meet, ticket, epoch);
    }
};
