//! Arenas through the Rust face, without Python.

use evermoe::error::Error;
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
        let table = 8 * position..8 * position + 8;
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

#[test]
fn an_arena_without_units_works() {
    let folder = tempfile::tempdir().unwrap();
    let arena = Arena::create(&folder.path().join("arena"), "", &[]).unwrap();
    let index = arena.begin(0);
    assert!(arena.commit(index).unwrap().is_empty());
    assert_eq!(arena.versions(), [(0, 0)]);
}
