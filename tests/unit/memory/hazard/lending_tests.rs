use super::*;

#[test]
fn many_read_or_one_writes() {
    let lending = Lending::default();
    let refused = |lending: &Lending| [Access::Read, Access::Write].map(|access| lending.refuses(access));
    assert!(!lending.is_lent() && refused(&lending) == [false, false]);
    assert!(lending.lend(Access::Read) && lending.lend(Access::Read) && !lending.lend(Access::Write));
    lending.give_back();
    assert_eq!(refused(&lending), [false, true]);
    lending.give_back();
    assert!(!lending.is_lent() && lending.lend(Access::Write));
    assert!(!lending.lend(Access::Read) && !lending.lend(Access::Write));
    assert_eq!(refused(&lending), [true, true]);
    lending.give_back();
    assert_eq!(refused(&lending), [false, false]);
}
