//! Types of gradients, and the kernels that convert them to the wire type and back.

use super::kernels::host_kernels::{norm_host, pack_host, unpack_host};
use crate::{
    DType, Element,
    driver::{HostKernel, KernelArg, ValueBytes},
    memory::DeviceCopy,
};
use half::{bf16, f16};

/// The types of gradients: `f32`, `f64`, `half::f16` and `half::bf16`. Sealed, since the kernels are part of the crate.
#[diagnostic::on_unimplemented(
    message = "gradients of type `{Self}` are not exchanged",
    note = "those of f32, f64, half::f16 and half::bf16 are"
)]
pub trait Gradient: Element + private::Kernels {
    /// The type of computations, and so of the [norm](super::Exchanged::norm): `f64` for `f64`, else `f32`.
    type Norm: DeviceCopy;
}

pub(super) mod private {
    use super::{DType, HostKernel, KernelArg};

    pub type Named = (&'static str, HostKernel);

    #[derive(Clone, Copy)]
    pub struct Between {
        pub pack: Named,
        pub unpack: Named,
    }

    pub trait Kernels {
        const NORM_KERNEL: Named;

        /// None if the wire type is not narrower.
        fn kernels(wire: DType) -> Option<Between>;
        /// The factor of the gradients as a kernel argument. None if it is not finite in the type of computations.
        fn factor(factor: f64) -> Option<KernelArg>;
    }
}
use private::{Between, Named};

/// Conversion to the wire type `W` and back: `kernels/gradients.cu` in Rust.
pub(super) trait OnWire<W: Element>: Gradient {
    /// Rounds once, to nearest even.
    fn narrow(self, factor: Self::Norm) -> W;
    fn wide(wire: W) -> Self;
}

macro_rules! gradients {
    ($($G:ty, $A:ty, $norm:literal: [$($W:ty, $pack:literal, $unpack:literal, $narrow:expr, $wide:expr;)+])+) => {$(
        impl Gradient for $G {
            type Norm = $A;
        }

        impl private::Kernels for $G {
            const NORM_KERNEL: Named = ($norm, norm_host::<$A>);

            fn kernels(wire: DType) -> Option<Between> {
                $(if wire == <$W>::DTYPE {
                    let (pack, unpack): (Named, Named) =
                        (($pack, pack_host::<$G, $W>), ($unpack, unpack_host::<$G, $W>));
                    return Some(Between { pack, unpack });
                })+
                None
            }

            fn factor(factor: f64) -> Option<KernelArg> {
                let factor = factor as $A;
                factor.is_finite().then(|| KernelArg::Value(ValueBytes::new(bytemuck::bytes_of(&factor))))
            }
        }

        $(impl OnWire<$W> for $G {
            fn narrow(self, factor: $A) -> $W {
                $narrow(<$A>::from(self) * factor)
            }
            fn wide(wire: $W) -> Self {
                $wide(wire)
            }
        })+
    )+};
}

fn same<T>(x: T) -> T {
    x
}

gradients! {
    f32, f32, "gradient_norm_f32": [
        f32, "pack_f32_f32", "unpack_f32_f32", same, same;
        f16, "pack_f32_f16", "unpack_f32_f16", f16::from_f32, f16::to_f32;
        bf16, "pack_f32_bf16", "unpack_f32_bf16", bf16::from_f32, bf16::to_f32;
    ]
    f64, f64, "gradient_norm_f64": [
        f64, "pack_f64_f64", "unpack_f64_f64", same, same;
        f32, "pack_f64_f32", "unpack_f64_f32", |x| x as f32, f64::from;
    ]
    f16, f32, "gradient_norm_f32": [f16, "pack_f16_f16", "unpack_f16_f16", f16::from_f32, same;]
    bf16, f32, "gradient_norm_f32": [bf16, "pack_bf16_bf16", "unpack_bf16_bf16", bf16::from_f32, same;]
}
