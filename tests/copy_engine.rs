//! The copying thread with real threads around it: published versions are complete, cancelled ones stay invisible.

use evermoe::Error;
use evermoe::snapshot::{Arena, Capture, CaptureState, CopyEngine, Run, digest};
use std::any::Any;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

/// Small numbers that look random: xorshift.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % sides as u64) as usize
    }
}

/// Units of scattered runs, and memory that holds them in some other order.
struct Sources {
    units: Vec<Vec<Vec<u8>>>,
}

impl Sources {
    fn new(dice: &mut Dice) -> Self {
        let run = |dice: &mut Dice| match dice.roll(8) {
            0 => 0,
            1 => 100_000 + dice.roll(60_000),
            _ => dice.roll(3000),
        };
        let units =
            (0..1 + dice.roll(6)).map(|_| (0..dice.roll(12)).map(|_| vec![0; run(dice)]).collect()).collect();
        Self { units }
    }

    /// Sets bytes that depend on the version, the run and the position in it.
    fn set(&mut self, version: u64) {
        for (position, run) in self.units.iter_mut().flatten().enumerate() {
            for (place, byte) in run.iter_mut().enumerate() {
                *byte = (version as usize * 31 + position * 7 + place * 13 / 5) as u8;
            }
        }
    }

    fn runs(&self) -> Vec<Vec<Run>> {
        let run = |run: &Vec<u8>| Run { address: run.as_ptr().expose_provenance(), bytes: run.len() };
        self.units.iter().map(|unit| unit.iter().map(run).collect()).collect()
    }

    fn arena(&self, path: &Path) -> Arc<Arena> {
        let size = |(index, unit): (usize, &Vec<Vec<u8>>)| {
            (format!("unit {index}"), unit.iter().map(Vec::len).sum())
        };
        Arc::new(
            Arena::create(path, "", &self.units.iter().enumerate().map(size).collect::<Vec<_>>()).unwrap(),
        )
    }

    /// Checks that the arena's buffer holds the current bytes, with the right digests.
    fn check(&self, arena: &Arena, index: usize) {
        let start = arena.buffer(index).unwrap();
        let digests = arena.digests(index).unwrap();
        for ((unit, runs), recorded) in arena.layout().units().iter().zip(&self.units).zip(digests) {
            // SAFETY: the unit lies in the buffer, which nothing writes now.
            let bytes = unsafe { std::slice::from_raw_parts(start.add(unit.offset), unit.bytes) };
            assert!(bytes == runs.concat(), "{}", unit.name);
            assert_eq!(recorded, digest(bytes), "{}", unit.name);
        }
    }
}

fn capture(
    engine: &CopyEngine,
    arena: &Arc<Arena>,
    version: u64,
    sources: &Sources,
    kept: Box<dyn Any + Send>,
) -> Capture {
    // SAFETY: the tests do not change the sources until the capture is over.
    unsafe { engine.capture(arena, version, &sources.runs(), kept) }.unwrap()
}

/// Counts how often it was dropped.
struct Kept(Arc<AtomicUsize>);

impl Drop for Kept {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn flip_the_gate(engine: &CopyEngine, over: &AtomicBool, seed: u64) {
    let mut dice = Dice(seed);
    while !over.load(Ordering::Relaxed) {
        match dice.roll(4) {
            0 => engine.close_gate(),
            1 => engine.open(None),
            _ => engine.open(Some(dice.roll(40_000))),
        }
        thread::yield_now();
    }
    engine.open(None);
}

/// One trainer: captures version after version, waits, hurries or cancels at random, and then writes the sources
/// immediately.
fn train(engine: &CopyEngine, path: &Path, seed: u64) -> [usize; 2] {
    let mut dice = Dice(seed);
    let mut sources = Sources::new(&mut dice);
    let arena = sources.arena(path);
    let drops = Arc::new(AtomicUsize::new(0));
    let (mut newest, mut counts) = (None, [0, 0]);
    for version in 1..=60 {
        sources.set(version);
        let capture = capture(engine, &arena, version, &sources, Box::new(Kept(drops.clone())));
        let some = dice.roll(arena.layout().payload_bytes() + 1);
        let cancels = dice.roll(3) == 0;
        if cancels {
            if dice.roll(2) == 0 {
                let _ = capture.wait(Some(some), Some(Duration::from_micros(dice.roll(300) as u64)));
            }
            capture.cancel();
        } else {
            let done = capture.wait(Some(some), Some(Duration::from_millis(2))).unwrap();
            assert!(done <= arena.layout().payload_bytes());
            capture.hurry();
            assert_eq!(capture.wait(None, None).unwrap(), arena.layout().payload_bytes());
        }
        assert_eq!(drops.load(Ordering::SeqCst), version as usize, "kept is dropped before the end shows");
        let versions: Vec<u64> = arena.versions().into_iter().map(|(_, version)| version).collect();
        match capture.state() {
            CaptureState::Complete => {
                assert_eq!(arena.versions()[0], (capture.index(), version));
                sources.check(&arena, capture.index());
                (newest, counts[0]) = (Some(version), counts[0] + 1);
            }
            CaptureState::Cancelled => {
                assert!(cancels);
                let refused = capture.wait(Some(0), None);
                assert!(matches!(refused, Err(Error::Cancelled { .. })), "{refused:?}");
                assert_eq!(
                    versions.first(),
                    newest.as_ref(),
                    "the newest complete version stays, and no other is visible"
                );
                counts[1] += 1;
            }
            state => panic!("{state:?} after the end"),
        }
        assert!(arena.versions().iter().all(|&(index, _)| arena.verify(index).unwrap().is_empty()));
    }
    counts
}

#[test]
fn what_is_published_is_whole_and_what_is_cancelled_stays_invisible() {
    let folder = tempfile::tempdir().unwrap();
    for (round, chunk_bytes) in [1 << 20, 4096, 1000].into_iter().enumerate() {
        let (engine, over) = (CopyEngine::new(chunk_bytes).unwrap(), AtomicBool::new(false));
        let counts = thread::scope(|scope| {
            let (engine, over, folder) = (&engine, &over, folder.path());
            scope.spawn(move || flip_the_gate(engine, over, 77 + round as u64));
            let trainers: Vec<_> = (0..3_u64)
                .map(|trainer| {
                    let path = folder.join(format!("{round}-{trainer}"));
                    scope.spawn(move || train(engine, &path, 1 + round as u64 * 10 + trainer))
                })
                .collect();
            let counts: Vec<_> = trainers.into_iter().map(|trainer| trainer.join()).collect();
            over.store(true, Ordering::Relaxed);
            counts.into_iter().map(Result::unwrap).fold([0, 0], |sum, one| [sum[0] + one[0], sum[1] + one[1]])
        });
        assert!(counts[0] > 90 && counts[1] > 0, "{counts:?}: both must happen");
    }
}

/// A source of one unit, an arena for it, and an engine with a closed gate.
fn one_unit(bytes: usize, chunk_bytes: usize) -> (tempfile::TempDir, Sources, Arc<Arena>, CopyEngine) {
    let folder = tempfile::tempdir().unwrap();
    let mut sources = Sources { units: vec![vec![vec![0; bytes]]] };
    sources.set(3);
    let arena = sources.arena(&folder.path().join("arena"));
    (folder, sources, arena, CopyEngine::new(chunk_bytes).unwrap())
}

#[test]
fn the_gate_counts_to_the_byte() {
    let (_folder, sources, arena, engine) = one_unit(10_000, 4096);
    let capture = capture(&engine, &arena, 1, &sources, Box::new(()));
    assert_eq!((capture.state(), capture.done_bytes()), (CaptureState::Waiting, 0));
    engine.open(Some(5000));
    assert_eq!(capture.wait(Some(64 + 5000), None).unwrap(), 5064);
    engine.open(Some(4999));
    assert_eq!(capture.wait(Some(64 + 9999), None).unwrap(), 10_063);
    assert_eq!(capture.wait(None, Some(Duration::from_millis(5))).unwrap(), 10_063);
    assert_eq!((capture.state(), arena.versions().len()), (CaptureState::Copying, 0));
    engine.open(Some(1));
    assert_eq!(capture.wait(None, None).unwrap(), arena.layout().payload_bytes());
    sources.check(&arena, capture.index());
    assert!(capture.busy() > Duration::ZERO);
    capture.cancel();
    assert_eq!((capture.state(), arena.versions()), (CaptureState::Complete, vec![(0, 1)]), "too late");
}

#[test]
fn a_hurried_capture_takes_those_before_it_along() {
    let (_folder, sources, arena, engine) = one_unit(10_000, 4096);
    let other = sources.arena(&arena.path().with_extension("other"));
    let last = sources.arena(&arena.path().with_extension("last"));
    let captures = [&arena, &other, &last].map(|arena| capture(&engine, arena, 1, &sources, Box::new(())));
    captures[1].hurry();
    captures[1].wait(None, None).unwrap();
    assert_eq!((captures[0].state(), captures[2].state()), (CaptureState::Complete, CaptureState::Waiting));
}

#[test]
fn a_cancelled_capture_makes_way_for_the_next() {
    let (_folder, sources, arena, engine) = one_unit(10_000, 4096);
    let empty = Sources { units: vec![vec![]] };
    let other = empty.arena(&arena.path().with_extension("other"));
    let first = capture(&engine, &arena, 1, &sources, Box::new(()));
    let second = capture(&engine, &other, 1, &empty, Box::new(()));
    engine.open(Some(4096));
    assert_eq!(first.wait(Some(64 + 4096), None).unwrap(), 64 + 4096);
    assert_eq!(second.state(), CaptureState::Waiting, "in their order");
    first.cancel();
    first.cancel();
    second.wait(None, None).unwrap();
    assert!(arena.versions().is_empty());
    let again = capture(&engine, &arena, 2, &sources, Box::new(()));
    again.hurry();
    again.wait(None, None).unwrap();
    assert_eq!(arena.versions(), [(first.index(), 2)]);
    sources.check(&arena, again.index());
}

#[test]
fn an_arena_takes_one_capture_at_a_time() {
    let (_folder, sources, arena, engine) = one_unit(100, 4096);
    let first = capture(&engine, &arena, 6, &sources, Box::new(()));
    // SAFETY: the sources are left alone.
    let refused = unsafe { engine.capture(&arena, 7, &sources.runs(), Box::new(())) }.unwrap_err();
    assert!(refused.to_string().contains("version 6 is still being captured"), "{refused}");
    first.cancel();
    let second = capture(&engine, &arena, 7, &sources, Box::new(()));
    second.hurry();
    second.wait(None, None).unwrap();
    assert_eq!(arena.versions(), [(0, 7)]);
}

#[test]
fn nothing_to_copy_needs_no_gate() {
    let folder = tempfile::tempdir().unwrap();
    let engine = CopyEngine::new(1).unwrap();
    for (name, units) in [("none", vec![]), ("empty", vec![vec![], vec![vec![]]])] {
        let sources = Sources { units };
        let arena = sources.arena(&folder.path().join(name));
        let capture = capture(&engine, &arena, 4, &sources, Box::new(()));
        capture.wait(None, None).unwrap();
        assert_eq!(arena.versions(), [(0, 4)]);
        sources.check(&arena, 0);
    }
}

#[test]
fn wrong_sources_begin_nothing() {
    let (_folder, sources, arena, engine) = one_unit(100, 4096);
    engine.open(None);
    for version in [1, 2] {
        capture(&engine, &arena, version, &sources, Box::new(())).wait(None, None).unwrap();
    }
    let mut runs = sources.runs();
    runs[0][0].bytes = 99;
    // SAFETY: the sources are left alone.
    let refused = unsafe { engine.capture(&arena, 3, &runs, Box::new(())) }.unwrap_err();
    assert!(matches!(&refused, Error::Invalid { .. }) && refused.to_string().contains("unit 0"), "{refused}");
    assert_eq!(arena.versions(), [(1, 2), (0, 1)]);
    assert!(CopyEngine::new(0).is_err());
}

#[test]
fn a_buffer_that_somebody_else_committed_is_a_cancelled_capture_with_the_reason() {
    let (_folder, sources, arena, engine) = one_unit(100, 64);
    let capture = capture(&engine, &arena, 1, &sources, Box::new(()));
    arena.commit(capture.index()).unwrap();
    capture.hurry();
    let refused = capture.wait(None, None).unwrap_err().to_string();
    assert!(refused.contains("buffer 0 is not being written"), "{refused}");
}

#[test]
fn sources_are_fetched_before_they_are_read() {
    let (_folder, sources, arena, engine) = one_unit(10_000, 4096);
    let staged = Arc::new((0..10_000).map(|_| AtomicU8::new(0)).collect::<Vec<_>>());
    let runs = [vec![Run { address: staged.as_ptr().expose_provenance(), bytes: 10_000 }]];
    let from = sources.units[0][0].clone();
    let start = |version, limit: usize| {
        let (staged, from) = (staged.clone(), from.clone());
        let mut fetched = 0;
        let fetch = move |_: *mut u8| {
            let more = fetched..fetched + 2500;
            if more.end > limit {
                return Err(Error::Internal(format!("{limit} bytes and no more")));
            }
            more.clone().for_each(|place| staged[place].store(from[place], Ordering::Relaxed));
            // The previous bytes have been copied.
            (0..more.start).for_each(|place| staged[place].store(0xEE, Ordering::Relaxed));
            fetched = more.end;
            Ok(fetched)
        };
        // SAFETY: fetched bytes do not change until they were copied.
        unsafe { engine.capture_fetched(&arena, version, Some(&runs), Box::new(fetch), None, Box::new(())) }
            .unwrap()
    };
    let (refused, after) = (start(1, 9999), arena.path().with_extension("after"));
    let after = capture(&engine, &sources.arena(&after), 1, &sources, Box::new(()));
    engine.open(None);
    let message = refused.wait(None, None).unwrap_err().to_string();
    assert!(message.contains("version 1 was cancelled: 9999 bytes and no more"), "{message}");
    assert_eq!((refused.done_bytes(), arena.versions()), (64 + 4096, vec![]));
    after.wait(None, None).unwrap();
    let complete = start(2, 10_000);
    complete.wait(None, None).unwrap();
    sources.check(&arena, complete.index());
}

#[test]
fn shutdown_frees_all_who_wait() {
    let (_folder, sources, arena, engine) = one_unit(100_000, 10);
    let other = sources.arena(&arena.path().with_extension("other"));
    let drops = Arc::new(AtomicUsize::new(0));
    let captures =
        [&arena, &other].map(|arena| capture(&engine, arena, 1, &sources, Box::new(Kept(drops.clone()))));
    engine.open(Some(50));
    captures[0].wait(Some(64 + 50), None).unwrap();
    thread::scope(|scope| {
        let waiters = captures.each_ref().map(|capture| scope.spawn(|| capture.wait(None, None)));
        engine.shutdown();
        for waiter in waiters {
            let refused = waiter.join().unwrap().unwrap_err();
            assert!(refused.to_string().contains("shut down"), "{refused}");
        }
    });
    engine.shutdown();
    assert_eq!(drops.load(Ordering::SeqCst), 2);
    assert!(captures.iter().all(|capture| capture.state() == CaptureState::Cancelled));
    captures[0].cancel();
    assert!(arena.versions().is_empty() && other.versions().is_empty());
    // SAFETY: the sources are left alone.
    let refused = unsafe { engine.capture(&arena, 2, &sources.runs(), Box::new(())) }.unwrap_err();
    assert!(refused.to_string().contains("shut down"), "{refused}");
}

#[test]
fn an_engine_that_is_dropped_is_shut_down() {
    let (_folder, sources, arena, engine) = one_unit(100_000, 10);
    let capture = capture(&engine, &arena, 1, &sources, Box::new(()));
    drop(engine);
    assert_eq!(capture.state(), CaptureState::Cancelled);
    capture.hurry();
    assert!(capture.wait(None, None).is_err());
}

#[test]
fn an_engine_may_end_on_its_own_thread() {
    let (_folder, sources, arena, engine) = one_unit(100, 10);
    let engine = Arc::new(engine);
    let capture = capture(&engine, &arena, 1, &sources, Box::new(engine.clone()));
    capture.hurry();
    drop(engine);
    assert_eq!(capture.wait(None, None).unwrap(), arena.layout().payload_bytes());
}
