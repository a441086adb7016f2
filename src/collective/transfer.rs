//! [`Transfer`]: values that cross from device to device, and from process to process. Where
//! [`give`](crate::Device::give) sends a value to another process, it looks the type up in the pool's [`Codecs`]: those
//! of [`known`], and those of [`Builder::register_transfer`](crate::Builder::register_transfer).

use crate::fabric::{Codec, Codecs, Element, Pack, Unpack};
use crate::{Device, DeviceBuffer, error::Result, memory::DeviceCopy};
use std::sync::Arc;

/// A value that crosses from one device to another, and, if it has [`pack`](Self::pack) and [`unpack`](Self::unpack),
/// from one process to another.
///
/// Implemented for [`DeviceBuffer`], for an `Arc` of one (a stage can keep its output and pass it on, too), for
/// numbers, `bool` and `String`, and for tuples, `Vec` and `Option` of all these.
/// [`transfer_fields!`](crate::transfer_fields) does it for a struct of your own, field by field:
///
/// ```
/// struct Batch {
///     x: gpu_pool::DeviceBuffer<f32>,
///     rows: usize,
/// }
/// gpu_pool::transfer_fields!(Batch { x, rows });
/// ```
///
/// The page "Pipelines" of the guide has one by hand, for an enum.
pub trait Transfer: Send + Sized + 'static {
    /// The value with its memory on `dev`. Memory that is there already stays where it is. Asynchronous: copies run on
    /// the current stream of `dev`, which waits for the work of the device that the memory comes from.
    ///
    /// # Errors
    /// `OutOfMemory`, `WrongPool`, [`Error::Aborted`](crate::Error::Aborted), the driver's.
    fn transfer(self, dev: &Device) -> Result<Self>;

    /// Takes the value apart for another process.
    ///
    /// # Errors
    /// The type's own. Without an implementation: [`Error::InvalidArgument`](crate::Error::InvalidArgument).
    fn pack(self, into: &mut Pack) -> Result<()> {
        Err(into.refuse::<Self>())
    }

    /// Puts a value together from the parts that [`pack`](Self::pack) has written, in the same order, with its memory
    /// on the device that takes it. That memory is not filled yet: the parts come when the whole value is read.
    ///
    /// # Errors
    /// `OutOfMemory`; `InvalidArgument` for a value that was packed otherwise; the type's own. An error fails the gang.
    fn unpack(from: &mut Unpack<'_>) -> Result<Self> {
        Err(from.refuse::<Self>())
    }
}

/// Implements [`Transfer`] for a struct of yours, with all of its fields, in any order.
#[macro_export]
macro_rules! transfer_fields {
    ($Type:ident { $($field:ident),+ $(,)? }) => {
        impl $crate::collective::Transfer for $Type {
            fn transfer(self, dev: &$crate::Device) -> $crate::Result<Self> {
                Ok($Type { $($field: $crate::collective::Transfer::transfer(self.$field, dev)?),+ })
            }
            fn pack(self, into: &mut $crate::collective::Pack) -> $crate::Result<()> {
                $($crate::collective::Transfer::pack(self.$field, into)?;)+
                Ok(())
            }
            fn unpack(from: &mut $crate::collective::Unpack<'_>) -> $crate::Result<Self> {
                Ok($Type { $($field: $crate::collective::Transfer::unpack(from)?),+ })
            }
        }
    };
}

pub(crate) fn codec<T: Transfer>() -> Codec<T> {
    Codec { pack: T::pack, unpack: T::unpack }
}

#[track_caller]
fn copied<T: DeviceCopy>(x: &DeviceBuffer<T>, dev: &Device) -> Result<Option<DeviceBuffer<T>>> {
    if x.device() == dev.index() {
        return Ok(None);
    }
    let here = x.copy_to(dev)?;
    // The memory goes back to its device. Its next user waits for this copy, and not for later ones.
    dev.stream.record_early("transfer")?;
    Ok(Some(here))
}

impl<T: DeviceCopy> Transfer for DeviceBuffer<T> {
    fn transfer(self, dev: &Device) -> Result<Self> {
        Ok(copied(&self, dev)?.unwrap_or(self))
    }

    fn pack(self, into: &mut Pack) -> Result<()> {
        into.buffer(&self);
        Ok(())
    }

    fn unpack(from: &mut Unpack<'_>) -> Result<Self> {
        from.buffer()
    }
}

impl<T: DeviceCopy> Transfer for Arc<DeviceBuffer<T>> {
    fn transfer(self, dev: &Device) -> Result<Self> {
        Ok(copied(&self, dev)?.map_or(self, Arc::new))
    }

    fn pack(self, into: &mut Pack) -> Result<()> {
        into.buffer(&self);
        Ok(())
    }

    fn unpack(from: &mut Unpack<'_>) -> Result<Self> {
        from.buffer().map(Arc::new)
    }
}

impl<A: Transfer> Transfer for Vec<A> {
    fn transfer(self, dev: &Device) -> Result<Self> {
        self.into_iter().map(|a| a.transfer(dev)).collect()
    }

    fn pack(self, into: &mut Pack) -> Result<()> {
        self.len().pack(into)?;
        self.into_iter().try_for_each(|a| into.some(|into| a.pack(into)))
    }

    fn unpack(from: &mut Unpack<'_>) -> Result<Self> {
        (0..usize::unpack(from)?).map(|_| from.some(A::unpack)).collect()
    }
}

impl<A: Transfer> Transfer for Option<A> {
    fn transfer(self, dev: &Device) -> Result<Self> {
        self.map(|a| a.transfer(dev)).transpose()
    }

    fn pack(self, into: &mut Pack) -> Result<()> {
        self.is_some().pack(into)?;
        self.map_or(Ok(()), |a| a.pack(into))
    }

    fn unpack(from: &mut Unpack<'_>) -> Result<Self> {
        bool::unpack(from)?.then(|| A::unpack(from)).transpose()
    }
}

/// Values without memory of a device. `$bytes` are what they are written as; `$read` reads these.
macro_rules! hop_as_they_are {
    ($($T:ty: |$x:ident| $bytes:expr, |$from:ident| $read:expr;)+) => {
        $(impl Transfer for $T {
            fn transfer(self, _: &Device) -> Result<Self> {
                Ok(self)
            }

            fn pack(self, into: &mut Pack) -> Result<()> {
                let $x = self;
                into.fixed(&$bytes);
                Ok(())
            }

            fn unpack($from: &mut Unpack<'_>) -> Result<Self> {
                Ok($read)
            }
        })+
    };
}
macro_rules! hop_numbers {
    ($($T:ty),+) => {
        hop_as_they_are! { $($T: |x| x.to_le_bytes(), |from| <$T>::from_le_bytes(from.fixed()?);)+ }
    };
}
hop_numbers!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64);
hop_as_they_are! {
    // Processes of one cluster may have other sizes.
    usize: |x| (x as u64).to_le_bytes(), |from| u64::unpack(from)?.try_into().map_err(|_| from.nonsense())?;
    isize: |x| (x as i64).to_le_bytes(), |from| i64::unpack(from)?.try_into().map_err(|_| from.nonsense())?;
    bool: |x| [u8::from(x)], |from| u8::unpack(from)? != 0;
    (): |_x| [], |_from| ();
}

impl Transfer for String {
    fn transfer(self, _: &Device) -> Result<Self> {
        Ok(self)
    }

    fn pack(self, into: &mut Pack) -> Result<()> {
        into.bytes(self.as_bytes());
        Ok(())
    }

    fn unpack(from: &mut Unpack<'_>) -> Result<Self> {
        String::from_utf8(from.bytes()?.to_vec()).map_err(|_| from.nonsense())
    }
}

macro_rules! hop_tuple {
    ($(($A:ident $a:ident))+) => {
        impl<$($A: Transfer),+> Transfer for ($($A,)+) {
            fn transfer(self, dev: &Device) -> Result<Self> {
                let ($($a,)+) = self;
                Ok(($($a.transfer(dev)?,)+))
            }

            fn pack(self, into: &mut Pack) -> Result<()> {
                let ($($a,)+) = self;
                $($a.pack(into)?;)+
                Ok(())
            }

            fn unpack(from: &mut Unpack<'_>) -> Result<Self> {
                Ok(($($A::unpack(from)?,)+))
            }
        }
    };
}
each_start! { hop_tuple [] (A a) (B b) (C c) (D d) (E e) (F f) }

/// The types that [`Builder::register_transfer`](crate::Builder::register_transfer) need not name: buffers of all
/// [`Element`]s, pairs of these, numbers and texts; and `Vec`s of all.
pub(crate) fn known() -> Codecs {
    let mut all = Codecs::default();
    macro_rules! each {
        ($($T:ty),+) => { $(with_vec::<$T>(&mut all);)+ };
    }
    each!(bool, u8, i8, u16, i16, u32, i32, u64, i64, usize, isize, f32, f64, String, ());
    macro_rules! buffers {
        ($($T:ty),+) => { $(of_buffers::<$T>(&mut all);)+ };
    }
    buffers!(f32, f64, half::f16, half::bf16, i8, u8, i32, u32, i64, u64);
    all
}

fn with_vec<T: Transfer>(all: &mut Codecs) {
    all.insert(codec::<T>());
    all.insert(codec::<Vec<T>>());
}

fn of_buffers<A: Element>(all: &mut Codecs) {
    with_vec::<DeviceBuffer<A>>(all);
    all.insert(codec::<Arc<DeviceBuffer<A>>>());
    macro_rules! pairs {
        ($($B:ty),+) => { $(with_vec::<(DeviceBuffer<A>, DeviceBuffer<$B>)>(all);)+ };
    }
    pairs!(f32, f64, half::f16, half::bf16, i8, u8, i32, u32, i64, u64);
}

#[cfg(test)]
#[path = "../../tests/unit/collective/transfer_tests.rs"]
mod tests;
