//! How a value is taken apart for another process and put together there, and for which types a pool knows it.
//!
//! `collective/hand_over.rs` makes [`Pack`] and [`Unpack`]; the pool keeps the [`Codecs`]. Invariant: a value reads
//! back the parts that it has written, in the same order. A part left over, or missing, is an error.

use crate::error::{Error, Result};
use crate::{DeviceBuffer, gang::LastCall, memory::DeviceCopy};
use std::{
    any::{Any, TypeId, type_name},
    collections::HashMap,
    sync::Arc,
};

/// A value that is taken apart for another process: [`Transfer::pack`](crate::collective::Transfer::pack) fills it.
#[derive(Debug)]
pub struct Pack {
    call: LastCall,
    header: Vec<u8>,
    parts: Vec<DeviceBuffer<u8>>,
}

impl Pack {
    pub(crate) fn new(call: LastCall) -> Pack {
        Pack { call, header: Vec::new(), parts: Vec::new() }
    }

    /// Adds bytes of the host, of any format: [`Unpack::bytes`] returns them.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.fixed(&(bytes.len() as u64).to_le_bytes());
        self.fixed(bytes);
    }

    /// Bytes whose number the reader knows.
    pub(crate) fn fixed(&mut self, bytes: &[u8]) {
        self.header.extend_from_slice(bytes);
    }

    /// At least a byte, so that what a peer writes bounds how many values it can name.
    pub(crate) fn some<R>(&mut self, pack: impl FnOnce(&mut Self) -> R) -> R {
        let (before, packed) = (self.header.len(), pack(self));
        if self.header.len() == before {
            self.header.push(0);
        }
        packed
    }

    /// A buffer, which may still be in use elsewhere.
    pub(crate) fn buffer<T: DeviceCopy>(&mut self, buffer: &DeviceBuffer<T>) {
        self.fixed(&(buffer.len as u64).to_le_bytes());
        self.parts.push(DeviceBuffer::new(buffer.block.clone(), buffer.len * size_of::<T>()));
    }

    pub(crate) fn refuse<T>(&self) -> Error {
        refuse::<T>(self.call)
    }

    pub(crate) fn into_parts(self) -> (Vec<u8>, Vec<DeviceBuffer<u8>>) {
        (self.header, self.parts)
    }
}

/// A value from another process, in parts: [`Transfer::unpack`](crate::collective::Transfer::unpack) reads them.
pub struct Unpack<'a> {
    call: LastCall,
    header: &'a [u8],
    lens: &'a [usize],
    allocate: &'a dyn Fn(usize) -> Result<DeviceBuffer<u8>>,
    made: Vec<DeviceBuffer<u8>>,
}

debug_as!(Unpack<'_>, |self| lens = self.lens, ..);

impl<'a> Unpack<'a> {
    pub(crate) fn new(
        call: LastCall,
        header: &'a [u8],
        lens: &'a [usize],
        allocate: &'a dyn Fn(usize) -> Result<DeviceBuffer<u8>>,
    ) -> Self {
        Unpack { call, header, lens, allocate, made: Vec::new() }
    }

    /// The bytes that [`Pack::bytes`] has added.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the value was packed otherwise.
    pub fn bytes(&mut self) -> Result<&'a [u8]> {
        let len = usize::try_from(u64::from_le_bytes(self.fixed()?)).map_err(|_| self.nonsense())?;
        let (bytes, rest) = self.header.split_at_checked(len).ok_or_else(|| self.nonsense())?;
        self.header = rest;
        Ok(bytes)
    }

    pub(crate) fn fixed<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (bytes, rest) = self.header.split_first_chunk().ok_or_else(|| self.nonsense())?;
        self.header = rest;
        Ok(*bytes)
    }

    /// A part that [`Pack::some`] has added.
    pub(crate) fn some<R>(&mut self, unpack: impl FnOnce(&mut Self) -> Result<R>) -> Result<R> {
        let (before, value) = (self.header.len(), unpack(self)?);
        if self.header.len() == before {
            self.fixed::<1>()?;
        }
        Ok(value)
    }

    pub(crate) fn buffer<T: DeviceCopy>(&mut self) -> Result<DeviceBuffer<T>> {
        let len = usize::try_from(u64::from_le_bytes(self.fixed()?)).map_err(|_| self.nonsense())?;
        let (&bytes, rest) = self.lens.split_first().ok_or_else(|| self.nonsense())?;
        fail_if!(len.checked_mul(size_of::<T>()) != Some(bytes), self.nonsense());
        self.lens = rest;
        let made = (self.allocate)(bytes)?;
        let buffer = DeviceBuffer::new(made.block.clone(), len);
        self.made.push(made);
        Ok(buffer)
    }

    pub(crate) fn finish(self) -> Result<Vec<DeviceBuffer<u8>>> {
        match self.header.is_empty() && self.lens.is_empty() {
            true => Ok(self.made),
            false => Err(self.nonsense()),
        }
    }

    pub(crate) fn refuse<T>(&self) -> Error {
        refuse::<T>(self.call)
    }

    pub(crate) fn nonsense(&self) -> Error {
        let (op, site) = self.call;
        Error::invalid_at(site, op, "the value was packed otherwise than it is unpacked")
    }
}

fn refuse<T>((op, site): LastCall) -> Error {
    let of = type_name::<T>();
    let why = format_args!("{of} cannot go to another process: its `Transfer` has no `pack` and `unpack`");
    Error::invalid_at(site, op, why)
}

pub(crate) struct Codec<T> {
    pub(crate) pack: fn(T, &mut Pack) -> Result<()>,
    pub(crate) unpack: fn(&mut Unpack<'_>) -> Result<T>,
}

#[derive(Clone, Default)]
pub(crate) struct Codecs(HashMap<TypeId, Arc<dyn Any + Send + Sync>>);

impl Codecs {
    pub(crate) fn insert<T: 'static>(&mut self, codec: Codec<T>) {
        self.0.insert(TypeId::of::<T>(), Arc::new(codec));
    }

    pub(crate) fn with(mut self, more: &Codecs) -> Self {
        self.0.extend(more.0.iter().map(|(of, codec)| (*of, codec.clone())));
        self
    }

    pub(crate) fn get<T: 'static>(&self) -> Option<Codec<T>> {
        let &Codec { pack, unpack } = self.0.get(&TypeId::of::<T>())?.downcast_ref()?;
        Some(Codec { pack, unpack })
    }
}

debug_as!(Codecs, |self| "{} types", self.0.len());
