use super::*;

#[test]
fn a_rail_has_the_hosts_with_so_many_devices() {
    let devices = [2, 1, 3];
    assert_eq!(
        (0..4).map(|rail| hosts_of(&devices, rail)).collect::<Vec<_>>(),
        [vec![0, 1, 2], vec![0, 2], vec![2], vec![]]
    );
}
