//! Both halves of a kernel, compared: its device code on a GPU, and its Rust half on a software GPU. Tests of programs
//! with kernels of their own call it. Of the runtime it uses the public face, and a macro.

use gpu_pool::{
    Device, DeviceBuffer, DeviceCopy, Error, GpuPool, Kernel, LaunchDims, Result, each_start,
    kernel::{Arg, Param, Scalar, Signature},
};
use std::any::TypeId;

/// Runs `kernel` on the first GPU and on a software GPU with the same inputs, and compares the results in each `&mut`
/// slice. Without a GPU it prints `skipped: no CUDA device`.
///
/// Inputs are a tuple in the order of the parameters: a `Vec<T>` for a slice, and numbers as they are. Floats may
/// differ by `tolerance` times the larger of the two. Two NaNs are equal. All other elements must have the same bits,
/// and so must floats with a tolerance of 0. Compilers of device code fuse `a * b + c` into one rounding, so 0 is too
/// strict for most kernels (`nvcc --fmad=false` does not fuse).
///
/// The page "From `.cu` to launch" of the guide has an example.
///
/// # Safety
/// As for [`Device::launch`]: both halves fit the signature, and access only the given slices.
///
/// # Panics
/// If the halves differ; the message has the parameter, the element, and both values. If a device fails, the module
/// does not load, or the kernel has no Rust half.
#[track_caller]
pub unsafe fn twins<S: Signature>(
    kernel: &'static Kernel<S>,
    dims: LaunchDims,
    inputs: impl TwinInputs<S>,
    tolerance: f64,
) {
    let pool = |builder: gpu_pool::Builder| builder.module(kernel.module()).build();
    let found = match pool(GpuPool::builder().cuda().devices(&[0])) {
        Err(Error::NoDevice { .. }) => return println!("skipped: no CUDA device"),
        Err(error) => Err(error),
        // SAFETY: the caller's promise.
        Ok(gpu) => pool(GpuPool::builder().host(1))
            .and_then(|host| unsafe { compare(&gpu, &host, kernel, dims, inputs, tolerance) }),
    };
    match found {
        Ok(None) => {}
        Ok(Some(difference)) => panic!("kernel `{}`: {difference}", kernel.name()),
        Err(error) => panic!("kernel `{}`: {error}", kernel.name()),
    }
}

/// # Safety
/// As for [`twins`].
unsafe fn compare<S: Signature>(
    gpu: &GpuPool,
    host: &GpuPool,
    kernel: &'static Kernel<S>,
    dims: LaunchDims,
    inputs: impl TwinInputs<S>,
    tolerance: f64,
) -> Result<Option<String>> {
    // SAFETY: the caller's promise.
    let run = |pool: &GpuPool| pool.on(&[0]).run(|dev, _| unsafe { inputs.launch(dev, kernel, dims) });
    let (on_gpu, in_rust) = (run(gpu)?.swap_remove(0), run(host)?.swap_remove(0));
    Ok(on_gpu.iter().zip(&in_rust).enumerate().find_map(|(parameter, (gpu, rust))| {
        let (element, gpu, rust) = gpu.differs(rust, tolerance)?;
        Some(format!("parameter {parameter}, element {element}: {gpu} on the GPU, {rust} in Rust"))
    }))
}

/// The contents of a parameter after a kernel.
#[doc(hidden)]
pub enum Left {
    Nothing,
    Floats(Vec<f64>),
    /// Elements of any other type, with the bytes of one.
    Bytes(Vec<u8>, usize),
}

impl Left {
    fn of<T: DeviceCopy>(elements: &[T]) -> Self {
        fn floats<T: DeviceCopy, F: Copy + bytemuck::Pod + Into<f64>>(elements: &[T]) -> Option<Left> {
            (TypeId::of::<T>() == TypeId::of::<F>())
                .then(|| Left::Floats(bytemuck::cast_slice(elements).iter().map(|&x: &F| x.into()).collect()))
        }
        floats::<T, f32>(elements)
            .or_else(|| floats::<T, f64>(elements))
            .or_else(|| floats::<T, gpu_pool::half::f16>(elements))
            .or_else(|| floats::<T, gpu_pool::half::bf16>(elements))
            .unwrap_or_else(|| Left::Bytes(bytemuck::cast_slice(elements).to_vec(), size_of::<T>().max(1)))
    }

    fn differs(&self, other: &Left, tolerance: f64) -> Option<(usize, String, String)> {
        match (self, other) {
            (Left::Floats(a), Left::Floats(b)) => {
                let close = |a: f64, b: f64| {
                    let most = tolerance * a.abs().max(b.abs());
                    a.to_bits() == b.to_bits()
                        || a.is_nan() && b.is_nan()
                        || tolerance > 0.0 && most.is_finite() && (a - b).abs() <= most
                };
                let at = a.iter().zip(b).position(|(&a, &b)| !close(a, b))?;
                Some((at, format!("{:?}", a[at]), format!("{:?}", b[at])))
            }
            (Left::Bytes(a, size), Left::Bytes(b, _)) => {
                let element = |bytes: &[u8], at| format!("bytes {:02x?}", &bytes[at * size..(at + 1) * size]);
                let at = a.iter().zip(b).position(|(a, b)| a != b)? / size;
                Some((at, element(a, at), element(b, at)))
            }
            _ => None,
        }
    }
}

/// A value in host memory for the kernel parameter `P`: `Vec<T>` for `&[T]` and `&mut [T]`, each [`Scalar`] for itself.
pub trait TwinInput<P: Param>: Sync {
    #[doc(hidden)]
    type Held;
    #[doc(hidden)]
    type Given<'a>: Arg<P>;
    #[doc(hidden)]
    fn hold(&self, dev: &Device) -> Result<Self::Held>;
    #[doc(hidden)]
    fn give(held: &mut Self::Held) -> Self::Given<'_>;
    #[doc(hidden)]
    fn left(held: &Self::Held, dev: &Device) -> Result<Left>;
}

macro_rules! slices {
    ($($Param:ty, $Given:ty, |$held:ident, $dev:ident| $left:expr;)+) => {$(
        impl<T: DeviceCopy> TwinInput<$Param> for Vec<T> {
            type Held = DeviceBuffer<T>;
            type Given<'a> = $Given;

            fn hold(&self, dev: &Device) -> Result<Self::Held> {
                dev.upload(self)
            }

            fn give(held: &mut Self::Held) -> Self::Given<'_> {
                held
            }

            fn left($held: &Self::Held, $dev: &Device) -> Result<Left> {
                $left
            }
        }
    )+};
}
slices! {
    &'static [T], &'a DeviceBuffer<T>, |_held, _dev| Ok(Left::Nothing);
    &'static mut [T], &'a mut DeviceBuffer<T>, |held, dev| Ok(Left::of(&dev.download(held)?));
}

impl<S: Scalar> TwinInput<S> for S {
    type Held = S;
    type Given<'a> = S;

    fn hold(&self, _: &Device) -> Result<S> {
        Ok(*self)
    }

    fn give(held: &mut S) -> S {
        *held
    }

    fn left(_: &S, _: &Device) -> Result<Left> {
        Ok(Left::Nothing)
    }
}

/// A tuple of [`TwinInput`]s for the signature `S`.
#[diagnostic::on_unimplemented(
    message = "the inputs `{Self}` do not fit the kernel's parameters `{S}`",
    note = "a slice takes a `Vec`, a number takes exactly its type; one input is written `(x,)`"
)]
pub trait TwinInputs<S: Signature>: Sync {
    #[doc(hidden)]
    unsafe fn launch(&self, dev: &Device, kernel: &Kernel<S>, dims: LaunchDims) -> Result<Vec<Left>>;
}

macro_rules! tuple {
    ($(($P:ident $I:ident $i:tt))+) => {
        impl<$($P: Param, $I: TwinInput<$P>),+> TwinInputs<($($P,)+)> for ($($I,)+) {
            unsafe fn launch(&self, dev: &Device, kernel: &Kernel<($($P,)+)>, dims: LaunchDims) -> Result<Vec<Left>> {
                let mut held = ($(self.$i.hold(dev)?,)+);
                // SAFETY: the caller's promise.
                unsafe { dev.launch(kernel, dims, ($($I::give(&mut held.$i),)+))? };
                Ok(vec![$($I::left(&held.$i, dev)?),+])
            }
        }
    };
}
each_start! { tuple []
    (P0 I0 0) (P1 I1 1) (P2 I2 2) (P3 I3 3) (P4 I4 4) (P5 I5 5) (P6 I6 6) (P7 I7 7) (P8 I8 8) (P9 I9 9) (P10 I10 10)
    (P11 I11 11)
}

#[cfg(test)]
#[path = "../tests/unit/twins_tests.rs"]
mod tests;
