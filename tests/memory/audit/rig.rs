//! Kernels that go too far, and the reports of it.

use crate::support::{Gpus, failure};
use gpu_pool::{AsViewMut, Device, Error, GpuPool, LaunchDims, Module, Result, kernel};
use gpu_pool_lab::prelude::*;
use gpu_pool_lab::{
    Check,
    check::{Kind, Report},
};
use std::sync::Arc;

/// Kernels that touch one byte, at any distance from their argument.
pub static MODULE: Module = Module::ptx(
    r#"
.version 7.5
.target sm_75
.address_size 64

.visible .entry poke(.param .u64 x, .param .u64 at, .param .u32 value)
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [x];
    ld.param.u64 %rd2, [at];
    ld.param.u32 %r1, [value];
    cvta.to.global.u64 %rd3, %rd1;
    add.s64 %rd4, %rd3, %rd2;
    st.global.u8 [%rd4], %r1;
    ret;
}

.visible .entry peek(.param .u64 x, .param .u64 at, .param .u64 to)
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<7>;
    ld.param.u64 %rd1, [x];
    ld.param.u64 %rd2, [at];
    ld.param.u64 %rd5, [to];
    cvta.to.global.u64 %rd3, %rd1;
    cvta.to.global.u64 %rd6, %rd5;
    add.s64 %rd4, %rd3, %rd2;
    ld.global.u8 %r1, [%rd4];
    st.global.u8 [%rd6], %r1;
    ret;
}
"#,
);

/// Past its slice, wherever the pool's memory is: that is the mistake.
fn beside(x: &mut [u8], at: i64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut((x.as_mut_ptr().expose_provenance() as i64 + at) as usize)
}

kernel! {
    pub static POKE: "poke" in MODULE, fn(x: &mut [u8], at: i64, value: u32) |_| {
        // SAFETY: these tests poke within what the pool has mapped, and nobody else touches that meanwhile.
        unsafe { beside(x, at).write(value as u8) }
    }
    pub static PEEK: "peek" in MODULE, fn(x: &mut [u8], at: i64, to: &mut [u8]) |_| {
        // SAFETY: as above.
        to[0] = unsafe { beside(x, at).read() }
    }
}

pub const ONE: LaunchDims = LaunchDims { grid: (1, 1, 1), block: (1, 1, 1), shared_bytes: 0 };

pub fn poke(dev: &Device, x: &mut impl AsViewMut<Elem = u8>, at: i64, value: u32) -> Result<()> {
    // SAFETY: none, which is what the audit is for; in these tests it stays within the pool's memory.
    unsafe { dev.launch(&POKE, ONE, (x.view_mut(), at, value)) }
}

pub fn audited(gpus: Gpus, count: usize) -> GpuPool {
    gpus.builder(count).module(&MODULE).check(Check::Memory).build().unwrap()
}

#[track_caller]
pub fn found<R: std::fmt::Debug>(result: Result<R>) -> Arc<Report> {
    match failure(result) {
        Error::Misuse { report, .. } => {
            assert_eq!(report.kind, Kind::OutOfBounds, "{report}");
            report
        }
        other => panic!("not a report: {other}"),
    }
}
