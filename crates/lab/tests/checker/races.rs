//! Two accesses that nothing orders.

use crate::rig::*;
use gpu_pool::extend::driver::{Address, HostArg, KernelArg, Launch, LaunchDims, RawFunction};
use gpu_pool_lab::check::Kind;

#[test]
fn a_race_of_two_streams_and_its_mended_twin() {
    let gpu = &gpus(1)[0];
    let (x, to, s, t) = (memory(gpu), pinned(gpu), stream(gpu), stream(gpu));
    fill(gpu, x, 7, s).unwrap();
    let report = caught(down(gpu, to, x, t), Kind::Race);
    assert_eq!((report.bytes.clone(), report.now.write, report.now.stream), (0..BYTES, false, Some(1)));
    let before = report.before.as_ref().unwrap();
    assert_eq!((before.op, before.write, before.device, before.stream), ("fill_u8", true, Some(0), Some(0)));
    assert_eq!(report.allocation.as_ref().unwrap().bytes, BYTES);

    // It did not run, and left nothing behind: ordered, the same call is fine, and so is whatever else uses `to`.
    idle(gpu, t);
    assert_eq!(look(to), 0);
    fill(gpu, to, 1, s).unwrap();
    order(gpu, s, gpu, t);
    down(gpu, to, x, t).unwrap();
    idle(gpu, t);
    assert_eq!(look(to), 7);
}

#[test]
fn only_the_bytes_that_are_shared_count() {
    let gpu = &gpus(1)[0];
    let (x, s, t) = (memory(gpu), stream(gpu), stream(gpu));
    // SAFETY: in range; the streams are waited for.
    let part = |at: u64, n, s| unsafe { gpu.fill_u8(x + at, 1, n, s) };
    part(0, 100, s).unwrap();
    part(100, 100, t).unwrap();
    assert_eq!(caught(part(50, 100, t), Kind::Race).bytes, 50..100);
    assert_eq!(caught(part(99, 2, s), Kind::Race).bytes, 100..101);
    part(0, 0, t).unwrap();
    idle(gpu, s);
    idle(gpu, t);
}

#[test]
fn readers_do_not_race_and_a_writer_waits_for_all_of_them() {
    let gpu = &gpus(1)[0];
    let (x, s, readers) = (memory(gpu), stream(gpu), [stream(gpu), stream(gpu), stream(gpu)]);
    fill(gpu, x, 1, s).unwrap();
    idle(gpu, s);
    for reader in readers {
        down(gpu, pinned(gpu), x, reader).unwrap();
    }
    for (i, reader) in readers.into_iter().enumerate() {
        assert_eq!(caught(fill(gpu, x, 2, s), Kind::Race).before.as_ref().unwrap().stream, Some(i + 1));
        order(gpu, reader, gpu, s);
    }
    fill(gpu, x, 2, s).unwrap();
    idle(gpu, s);
}

/// What a kernel declares is what counts.
#[test]
fn kernels_by_their_declared_arguments() {
    /// # Safety
    /// None needed.
    unsafe fn nothing(_: LaunchDims, _: &[HostArg]) {}
    let gpu = &gpus(1)[0];
    let (x, y, s, t) = (memory(gpu), memory(gpu), stream(gpu), stream(gpu));
    let launch = |reads: Address, writes: Address, s| {
        let slice = |address, write| KernelArg::Slice { address, bytes: BYTES, write };
        let args = [slice(reads, false), slice(writes, true)];
        let (dims, function) = (LaunchDims::cover(1), RawFunction(0));
        // SAFETY: the kernel does nothing.
        unsafe {
            gpu.launch(&Launch { name: "saxpy", function, host: Some(nothing), dims, args: &args, early: false }, s)
        }
    };
    assert_eq!(caught(launch(x, y, s), Kind::UninitializedRead).now.detail, "`saxpy`");
    fill(gpu, x, 1, s).unwrap();
    launch(x, y, s).unwrap();
    let text = caught(launch(y, x, t), Kind::Race).to_string();
    assert!(text.contains("launch (`saxpy`, reads) on stream 1 of device 0"), "{text}");
    order(gpu, s, gpu, t);
    launch(y, x, t).unwrap();
    idle(gpu, t);
}

/// The source of a peer copy is written again before the copy has read it.
#[test]
fn the_source_of_a_peer_copy_is_kept_until_it_was_read() {
    let [a, b] = &two_gpus();
    let (xa, xb, sa, sb) = (memory(a), memory(b), stream(a), stream(b));
    fill(a, xa, 1, sa).unwrap();
    caught(peer(b, xb, a, xa, sb), Kind::Race);
    order(a, sa, b, sb);
    peer(b, xb, a, xa, sb).unwrap();
    let report = caught(fill(a, xa, 2, sa), Kind::Race);
    let before = report.before.as_ref().unwrap();
    assert_eq!((before.op, before.write, before.device, before.stream), ("copy_peer", false, Some(1), Some(0)));
    assert!(report.missing.starts_with("stream 0 of device 0 never waited for `copy_peer` on stream 0 of device 1"));
    order(b, sb, a, sa);
    fill(a, xa, 2, sa).unwrap();
    idle(a, sa);
}

#[cfg(feature = "blas")]
#[test]
fn a_product_touches_nothing_between_the_rows_of_its_matrices() {
    use gpu_pool::extend::driver::{Gemm, GemmMatrix, GemmType};
    let gpu = &gpus(1)[0];
    let (x, y, s) = (memory(gpu), memory(gpu), stream(gpu));
    // 2 x 2 in rows of 4: only the left half is written.
    for row in [0, 16] {
        // SAFETY: within the memory.
        unsafe { gpu.fill_u8(x + row, 0, 8, s) }.unwrap();
    }
    let left = |address| GemmMatrix::dense(address, 4);
    let product = |a, c, beta| {
        let (a, b, c) = (left(a), left(a), left(c));
        let gemm = Gemm { of: GemmType::F32, count: 1, m: 2, n: 2, k: 2, alpha: 1.0, a, b, beta, c };
        // SAFETY: the matrices are within the memory.
        unsafe { gpu.gemm(&gemm, s) }
    };
    product(x, y, 0.0).unwrap();
    product(x, y, 1.0).unwrap();
    caught(product(x + 8, y, 0.0), Kind::UninitializedRead);
    caught(product(x, y + 8, 1.0), Kind::UninitializedRead);
    idle(gpu, s);
}

#[cfg(feature = "blas")]
#[test]
fn a_product_reads_the_old_matrix_only_if_it_is_to_be_added() {
    use gpu_pool::extend::driver::{Gemm, GemmMatrix, GemmType};
    let gpu = &gpus(1)[0];
    let (a, b, c, s) = (memory(gpu), memory(gpu), memory(gpu), stream(gpu));
    fill(gpu, a, 0, s).unwrap();
    fill(gpu, b, 0, s).unwrap();
    let product = |beta| {
        let [a, b, c] = [a, b, c].map(|address| GemmMatrix::dense(address, 8));
        let gemm = Gemm { of: GemmType::F32, count: 1, m: 8, n: 8, k: 8, alpha: 1.0, a, b, beta, c };
        // SAFETY: the matrices are within the memory.
        unsafe { gpu.gemm(&gemm, s) }
    };
    caught(product(1.0), Kind::UninitializedRead);
    product(0.0).unwrap();
    product(1.0).unwrap();
    idle(gpu, s);
}
