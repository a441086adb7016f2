use super::{
    super::{FaultPlan, wrap},
    *,
};
use gpu_pool::extend::driver::host;

#[test]
fn devices_on_one_gpu_are_told_apart() {
    let devices = host::on_one_gpu(|| host::machine(&vec![host::HostConfig::default(); 3]));
    assert!(devices.iter().all(|device| device.info().uuid == devices[0].info().uuid));
    let common = Common::new(&devices);
    let wrapped = wrap(devices.clone(), &FaultPlan::new());
    for (i, (inner, outer)) in devices.iter().zip(&wrapped).enumerate() {
        assert_eq!((common.index(&**inner), common.index(&**outer)), (Some(i), Some(i)));
    }
    assert_eq!(common.index(&*host::machine(&[host::HostConfig::default()])[0]), None);
}
