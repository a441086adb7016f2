"""PyTorch's caching allocator through Python: stands in for `torch_allocator.cpp` where that cannot be built.

The orders and answers are the same. Every number includes the interpreter's time, and its lock if several threads call.
"""

import struct
import sys
import threading
import time

import torch
from torch.cuda import caching_allocator_alloc as allocate
from torch.cuda import caching_allocator_delete as free


def on_threads(threads, work):
    answers = [None] * threads

    def run(i):
        torch.cuda.set_device(i if work.by_device else 0)
        answers[i] = work(i)

    all_threads = [threading.Thread(target=run, args=(i,)) for i in range(threads)]
    for thread in all_threads:
        thread.start()
    for thread in all_threads:
        thread.join()
    if None in answers:
        sys.exit("torch_allocator.py: a thread has failed")
    return answers


def by_device(work):
    work.by_device = True
    return work


def stream(device):
    return torch.cuda.default_stream(device).cuda_stream


def mean(values):
    return sum(values) / len(values)


def pair(size, threads, rounds):
    start = threading.Barrier(threads)

    @by_device
    def work(device):
        queue = stream(device)
        for _ in range(rounds // 10 + 1):
            free(allocate(size, device, queue))
        start.wait()
        clock = time.perf_counter_ns()
        for _ in range(rounds):
            free(allocate(size, device, queue))
        return (time.perf_counter_ns() - clock) / rounds

    return mean(on_threads(threads, work))


def remote(size, threads, blocks):
    queue = stream(0)
    batches = [[allocate(size, 0, queue) for _ in range(blocks)] for _ in range(threads)]
    start = threading.Barrier(threads)

    def work(thread):
        start.wait()
        clock = time.perf_counter_ns()
        for block in batches[thread]:
            free(block)
        return (time.perf_counter_ns() - clock) / blocks

    work.by_device = False
    return mean(on_threads(threads, work))


class Side:
    def __init__(self):
        self.fraction, self.slots = 1.0, []

    def load(self, path, devices):
        for held in self.slots:
            for block in held:
                if block:
                    free(block)
        torch.cuda.empty_cache()
        with open(path, "rb") as file:
            slots, operations, first, again = struct.unpack("=4Q", file.read(32))
            steps = list(struct.iter_unpack("=2Q", file.read()))
        assert len(steps) == first + again
        self.operations, self.first, self.again, self.next = max(operations, 1), steps[:first], steps[first:], 0
        self.slots = [[0] * slots for _ in range(devices)]
        for device in range(devices):
            torch.cuda.set_per_process_memory_fraction(self.fraction if device == 0 else 1.0, device)
            torch.cuda.reset_peak_memory_stats(device)

    def replay(self, device, steps):
        held, queue, refused = self.slots[device], stream(device), 0
        for slot, size in steps:
            if size == 0:
                if held[slot]:
                    free(held[slot])
                held[slot] = 0
            else:
                try:
                    held[slot] = allocate(size, device, queue)
                except torch.OutOfMemoryError:
                    held[slot] = 0
                    refused += 1
        return refused

    def do_first(self, count):
        steps = self.first[self.next : self.next + count]
        self.next += count
        return sum(on_threads(len(self.slots), by_device(lambda device: self.replay(device, steps))))

    def do_again(self, rounds):
        start = threading.Barrier(len(self.slots))

        @by_device
        def work(device):
            if self.operations < 1000:
                self.replay(device, self.again)
            start.wait()
            clock = time.perf_counter_ns()
            refused = sum(self.replay(device, self.again) for _ in range(rounds))
            assert refused == 0, "out of memory in a trace that is timed"
            return (time.perf_counter_ns() - clock) / (rounds * self.operations)

        return mean(on_threads(len(self.slots), work))


def answer(side, order, number):
    what, *parts = order.split(":")
    stats = lambda name: torch.cuda.memory_stats(0).get(name, 0)
    if what == "pair":
        return pair(int(parts[0]), int(parts[1]), number)
    if what == "remote":
        return remote(int(parts[0]), int(parts[1]), number)
    if what == "limit":
        side.fraction = number / torch.cuda.mem_get_info(0)[1] if number else 1.0
        return 0
    if what == "load":
        side.load(parts[0], number)
        return 0
    if what == "first":
        return side.do_first(number)
    if what == "again":
        return side.do_again(number)
    if what == "calls":
        return stats("num_device_alloc") + stats("num_device_free")
    names = {"reserved": "reserved_bytes.all.current", "peak_reserved": "reserved_bytes.all.peak"}
    names["peak_allocated"] = "allocated_bytes.all.peak"
    return stats(names[what])


def main():
    torch.cuda.init()
    side = Side()
    for line in sys.stdin:
        order, number = line.split()
        print(f"{answer(side, order, int(number)):.6f}", flush=True)


if __name__ == "__main__":
    main()
