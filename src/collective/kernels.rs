//! stub
use super::{DType, ReduceOp};
use crate::{
    driver::{Address, HostKernel, KernelArg},
    kernel::Module,
};
pub(crate) const MOST: usize = 16;
pub(crate) const SIGNALS: usize = 256;
#[derive(Clone, Copy)]
pub(crate) struct Meet {
    pub signals: u64,
    pub members: u64,
    pub place: u64,
    pub deadline: u64,
    pub count: u32,
    pub me: u32,
    pub spare: u64,
}
impl Meet {
    pub(crate) const NONE: Meet = Meet { signals: 0, members: 0, place: 0, deadline: 0, count: 0, me: 0, spare: 0 };
    pub fn is_none(&self) -> bool {
        self.signals == 0
    }
}
pub(crate) struct Part {
    pub address: Address,
    pub bytes: usize,
}
pub(crate) struct Combine<'a> {
    pub dtype: DType,
    pub n: usize,
    pub op: ReduceOp,
    pub factors: &'a [f64],
    pub sources: &'a [Part],
    pub destinations: &'a [Part],
    pub meet: Meet,
}
impl Combine<'_> {
    pub fn args(&self, _software: bool) -> Vec<KernelArg> {
        todo!()
    }
}
pub(crate) struct Pairs<'a> {
    pub pairs: &'a [(Part, Part)],
    pub blocks_per_pair: u32,
    pub meet: Meet,
}
impl Pairs<'_> {
    pub fn args(&self, _software: bool) -> Vec<KernelArg> {
        todo!()
    }
}
pub(crate) struct Push<'a> {
    pub dtype: DType,
    pub n: usize,
    pub op: ReduceOp,
    pub factors: &'a [f64],
    pub source: Address,
    pub destination: Address,
    pub meet: Meet,
}
impl Push<'_> {
    pub fn args(&self) -> Vec<KernelArg> {
        todo!()
    }
}
pub(crate) struct Entry {
    pub module: &'static Module,
    pub name: &'static str,
    pub host: Option<HostKernel>,
}
impl Entry {
    pub(crate) fn of<S: crate::Signature>(k: &'static crate::Kernel<S>) -> Self {
        Entry { module: k.module, name: k.name, host: k.host }
    }
}
pub(crate) fn combine(_: DType) -> Entry {
    todo!()
}
pub(crate) fn push(_: DType) -> Entry {
    todo!()
}
pub(crate) fn pairs() -> Entry {
    todo!()
}
