//! Arenas through the Rust API, without Python.

use evermoe::Error;
use evermoe::snapshot::{Arena, digest};

fn units() -> Vec<(String, usize)> {
    vec![("dense".into(), 1000), ("expert".into(), 70_000)]
}

/// Writes every unit of a buffer with one byte.
fn fill(arena: &Arena, index: usize, value: u8) {
    let start = arena.buffer(index).unwrap();
    for unit in arena.layout().units() {
        // SAFETY: the unit lies in the buffer, and nothing else uses the arena of this test.
        unsafe { start.add(unit.offset).write_bytes(value, unit.bytes) };
    }
}

#[test]
fn versions_survive_the_mapping() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a/b/arena");
    let arena = Arena::create(&path, "meta", &units()).unwrap();
    for version in [4, 5, 6] {
        let index = arena.begin(version);
        fill(&arena, index, version as u8);
        assert_eq!(arena.commit(index).unwrap()[0], digest(&[version as u8; 1000]));
    }
    drop(arena);
    let arena = Arena::open(&path).unwrap();
    assert_eq!(arena.versions(), [(0, 6), (1, 5)]);
    assert_eq!(arena.layout().meta(), "meta");
    assert!(arena.verify(0).unwrap().is_empty() && arena.verify(1).unwrap().is_empty());
    arena.unlink().unwrap();
    assert!(matches!(Arena::open(&path), Err(Error::Io { .. })));
}

#[test]
fn every_flipped_byte_of_a_unit_or_its_digest_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let arena =
        Arena::create(&folder.path().join("arena"), "", &[("a".into(), 40), ("b".into(), 3)]).unwrap();
    let index = arena.begin(1);
    fill(&arena, index, 9);
    arena.commit(index).unwrap();
    let (start, layout) = (arena.buffer(index).unwrap(), arena.layout());
    for (position, unit) in layout.units().iter().enumerate() {
        let table = 8 * position + 8..8 * position + 16;
        for at in table.chain(unit.offset..unit.offset + unit.bytes) {
            // SAFETY: the offset lies in the buffer, and nothing else uses the arena of this test.
            let flip = || unsafe { *start.add(at) ^= 0x10 };
            flip();
            assert_eq!(arena.verify(index).unwrap(), std::slice::from_ref(&unit.name), "byte {at}");
            flip();
        }
    }
    assert!(arena.verify(index).unwrap().is_empty());
}

/// As if the state of one buffer stood before the bytes of the other, or a peer's late message filled it.
#[test]
fn a_buffer_of_another_version_than_it_is_said_to_be_is_not_there() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("arena");
    let arena = Arena::create(&path, "", &units()).unwrap();
    for version in [4, 5] {
        let index = arena.begin(version);
        fill(&arena, index, version as u8);
        arena.commit(index).unwrap();
    }
    let late = |arena: &Arena| {
        let (from, to, bytes) =
            (arena.buffer(1).unwrap(), arena.buffer(0).unwrap(), arena.layout().payload_bytes());
        // SAFETY: both buffers have that many bytes, and nothing else uses the arena of this test.
        unsafe { to.copy_from_nonoverlapping(from, bytes) };
    };
    late(&arena);
    assert_eq!(arena.versions(), [(1, 5)]);
    assert_eq!(arena.begin(6), 0);
    late(&arena);
    let error = arena.commit_received(0).unwrap_err();
    assert!(
        matches!(&error, Error::Corrupt { problem, .. } if problem.contains("expected version 6, received 5")),
        "{error}"
    );
    assert_eq!(arena.versions(), [(1, 5)]);
    arena.begin(5);
    arena.commit_received(0).unwrap();
    assert_eq!(arena.versions(), [(0, 5), (1, 5)]);
}

#[test]
fn what_is_no_file_is_no_arena() {
    let folder = tempfile::tempdir().unwrap();
    let [link, inner, socket] = ["link", "inner", "socket"].map(|name| folder.path().join(name));
    std::os::unix::fs::symlink(&inner, &link).unwrap();
    std::fs::create_dir(&inner).unwrap();
    let _bound = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    for path in [link, inner, socket] {
        assert!(matches!(Arena::open(&path), Err(Error::Corrupt { .. })), "{}", path.display());
    }
}

#[test]
fn an_arena_without_units_works() {
    let folder = tempfile::tempdir().unwrap();
    let arena = Arena::create(&folder.path().join("arena"), "", &[]).unwrap();
    let index = arena.begin(0);
    assert!(arena.commit(index).unwrap().is_empty());
    assert_eq!(arena.versions(), [(0, 0)]);
}

#[test]
fn several_threads_reserve_an_arena_together() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("arena");
    let arena = Arena::create_unreserved(&path, "", &[("unit".into(), 1 << 20)]).unwrap();
    std::thread::scope(|scope| {
        for most in [1 << 12, 3 << 12, 1 << 16] {
            let arena = &arena;
            scope.spawn(move || while !arena.reserve(most).unwrap() {});
        }
    });
    let metadata = std::fs::metadata(&path).unwrap();
    assert!(std::os::unix::fs::MetadataExt::blocks(&metadata) * 512 >= metadata.len());
    let index = arena.begin(1);
    fill(&arena, index, 3);
    arena.commit(index).unwrap();
    assert_eq!(Arena::open(&path).unwrap().versions(), [(index, 1)]);
}
