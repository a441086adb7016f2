//! Sums, differences and products of two buffers, element by element: `binary` of `kernels/pointwise.cu`. Invariant:
//! each element is computed by itself, in `f32` (of `f64` in `f64`), and rounded once.

use super::family::{In, Input, Maybe, Out, binary, each, kernels};
use crate::kernels::POINTWISE;
use crate::runtime::{Operations, same_len, tiles};
use gpu_pool::{AsView, AsViewMut, Device, DeviceBuffer, DeviceView, DeviceViewMut, Result, kernel::Float};

#[derive(Clone, Copy)]
enum Binary {
    Add,
    Sub,
    Mul,
}

fn binary<T: Float>(op: u32, x: T, y: T) -> T {
    let (x, y) = (T::wide(x), T::wide(y));
    T::narrow(match op {
        0 => x + y,
        1 => x - y,
        _ => x * y,
    })
}

kernels! { POINTWISE;
    fn binary_kernel(_, x: Maybe<T>, y: In<T>, z: Out<T>, n: u64, op: u32) = "binary" {
        each(n, x, z, y.iter(), |x, y| binary(op, x, *y));
    }
}

/// Sums, differences and products, element by element. Half types are computed in `f32` and rounded once. Streams and
/// errors: see [`ops`](super).
pub trait Pointwise: Operations {
    binary! { Float, launch;
        add add_into add_in_place Add "x + y" "1.0" "2.0" "3.0";
        sub sub_into sub_in_place Sub "x - y" "1.0" "2.0" "-1.0";
        mul mul_into mul_in_place Mul "x * y" "3.0" "2.0" "6.0";
    }
}

impl Pointwise for Device {}

#[track_caller]
fn launch<T: Float>(
    dev: &Device,
    op: &'static str,
    which: Binary,
    x: Option<DeviceView<'_, T>>,
    y: DeviceView<'_, T>,
    z: DeviceViewMut<'_, T>,
) -> Result<()> {
    let _here = dev.enter(op);
    let n = y.len();
    same_len(op, x.map_or(z.len(), |x| x.len()), n)?;
    same_len(op, z.len(), n)?;
    let args = (Input::view_or(x, z.address()), y, z, n as u64, which as u32);
    // SAFETY: all have `n` elements. In place the kernel reads and writes `z`.
    unsafe { dev.launch(&binary_kernel::<T>(), tiles::<T>(n), args) }
}
