"""Words of std, and names of variables, that help to tell the type of a value."""

# Types whose inherent methods stand in many rooms, and the names that variables of these types have.
TOKENS = {"dev": "Device", "group": "Group", "pool": "GpuPool", "builder": "Builder"}

# Methods of std. Where the type of a receiver is unknown, these names say nothing.
STD_METHODS = set("""
    add all and_then any append as_bytes as_deref as_mut as_ptr as_ref as_slice as_str binary_search borrow borrow_mut
    build by_ref bytes capacity cast chain chars checked_add chunks clear clone cloned close cmp collect contains
    copied copy count dedup default deref device download drain drop elapsed enter entry enumerate eq err expect
    extend fill filter find first flat_map flatten flush fmt fold for_each free get get_mut get_or_init group hash id
    index info insert inspect into into_inner into_iter is_empty is_none is_some iter iter_mut join keys last len load
    lock map map_err max memory min name new next notify_all notify_one nth ok or_else parse peek pop position push
    read record recv reduce remove repeat replace reserve resize rev rows send set skip sort spawn split split_at
    stack_size start starts_with stats store stream sum swap synchronize take then timeout to_owned to_string to_vec
    transpose trim truncate try_into unwrap unwrap_or update values wait with write zip
""".split())

# Types of std that pass calls on to what they hold; slices, arrays and vectors; and all that a type may be told by.
POINTERS = {"Rc", "Arc", "Box", "Ref", "RefMut", "MutexGuard", "Cow", "ManuallyDrop", "CachePadded"}
LIST = "[]"
KNOWN_STD = POINTERS | {
    "Option", "Result", "RefCell", "Cell", "Mutex", "RwLock", "Vec", "VecDeque", "SmallVec", "HashMap", "HashSet", LIST,
    "BTreeMap", "BTreeSet", "String", "str", "usize", "u8", "u16", "u32", "u64", "u128", "i8", "i16", "i32", "i64",
    "isize", "bool", "f32", "f64", "Duration", "Instant", "PhantomData", "Range", "OnceCell", "OnceLock", "Lazy",
}
