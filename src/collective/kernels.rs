//! stub
use super::{DType, ReduceOp};
use crate::{
    driver::{Address, HostKernel, KernelArg},
    kernel::Module,
};

pub(crate) struct Meet;
impl Meet {
    pub(crate) const NONE: Meet = Meet;
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
pub(crate) fn pairs() -> Entry {
    todo!()
}
