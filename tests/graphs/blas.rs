//! Matrix products in graphs.

use crate::support;
use gpu_pool::{Device, DeviceBuffer, Matrix};

fn products(gpus: support::Gpus) {
    gpus.run(1, |dev| {
        let (a, b) = (dev.upload(&[1.0f32, 2.0, 3.0, 4.0])?, dev.upload(&[1.0f32, 0.0, 0.0, 2.0])?);
        let (mut c, mut d) = (dev.zeros::<f32>(4)?, dev.zeros::<f32>(4)?);
        let product = |dev: &Device, x: &DeviceBuffer<f32>, y: &mut DeviceBuffer<f32>| {
            dev.gemm(1.0, Matrix::new(x, 2, 2)?, Matrix::new(&b, 2, 2)?, 1.0, y)
        };
        product(dev, &a, &mut c)?;
        let (graph, ()) = dev.capture(|dev| {
            product(dev, &a, &mut c)?;
            product(dev, &c, &mut d)
        })?;
        for _ in 0..2 {
            dev.launch_graph(&graph)?;
            product(dev, &a, &mut d)?;
        }
        assert_eq!(dev.download(&c)?, [3.0, 12.0, 9.0, 24.0]);
        assert_eq!(dev.download(&d)?, [7.0, 48.0, 21.0, 96.0]);
        drop(graph);
        product(dev, &a, &mut d)
    });
}

#[test]
fn host() {
    support::on_host(1, products);
}

#[test]
fn cuda() {
    support::on_cuda(1, products);
}
