//! A kernel that is busy for some clock cycles, like RMM's `compute_bound_kernel`, and then writes to its buffer.

use gpu_pool::{
    Device, DeviceBuffer, LaunchDims, Module, Result,
    extend::driver::{self, DriverRef, KernelArg, Launch, ModuleImage, RawFunction, RawStream, ValueBytes},
    kernel,
};
use std::time::{Duration, Instant};

const PTX: &str = "
.version 7.5
.target sm_75
.address_size 64

.visible .entry spin(.param .u64 x, .param .u64 clocks)
{
    .reg .pred %p<2>;
    .reg .b64 %rd<7>;
    ld.param.u64 %rd1, [x];
    ld.param.u64 %rd2, [clocks];
    cvta.to.global.u64 %rd3, %rd1;
    mov.u64 %rd4, %clock64;
SPIN:
    mov.u64 %rd5, %clock64;
    sub.u64 %rd6, %rd5, %rd4;
    setp.lt.u64 %p1, %rd6, %rd2;
    @%p1 bra SPIN;
    st.global.u64 [%rd3], %rd6;
    ret;
}
";

const ONE: LaunchDims = LaunchDims { grid: (1, 1, 1), block: (1, 1, 1), shared_bytes: 0 };

pub static MODULE: Module = Module::ptx(PTX);
kernel! {
    static SPIN: "spin" in MODULE, fn(x: &mut [u64], clocks: u64) |_dims| {
        // Counts as 10 GHz, so that a machine with few cores makes progress.
        let until = Instant::now() + Duration::from_nanos(clocks / 10);
        while Instant::now() < until {
            std::hint::spin_loop();
        }
        x[0] = clocks;
    }
}

/// Keeps a buffer in use for `clocks` cycles.
pub fn spin(dev: &Device, x: &mut DeviceBuffer<u64>, clocks: u64) -> Result<()> {
    // SAFETY: one thread, which writes the first element.
    unsafe { dev.launch(&SPIN, ONE, (x, clocks)) }
}

/// The same kernel, launched through the driver API.
pub struct RawSpin {
    pub gpu: DriverRef,
    function: RawFunction,
}

impl RawSpin {
    pub fn new(ordinal: usize) -> Self {
        let gpu = driver::cuda::open(ordinal).expect("it is open already");
        let ptx = Some(PTX.as_bytes());
        let image = ModuleImage { ptx, cubins: &[], packed: false, source: None, shared: false };
        let module = gpu.module_load(&image).expect("PTX that every GPU since 2018 takes");
        let function = gpu.function(module, "spin").expect("it is there");
        RawSpin { gpu, function }
    }

    /// Launches it on 8 bytes.
    pub fn launch(&self, address: u64, clocks: u64, stream: RawStream) {
        let args = [
            KernelArg::Slice { address, bytes: 8, write: true },
            KernelArg::Value(ValueBytes::new(&clocks.to_ne_bytes())),
        ];
        let launch = Launch { name: "spin", function: self.function, host: None, dims: ONE, args: &args, early: false };
        // SAFETY: the arguments fit the kernel; the memory lives until the stream is past the launch.
        unsafe { self.gpu.launch(&launch, stream) }.expect("a launch");
    }
}
