//! Damaged input of every kind that comes from files, shared memory or other members: hundreds of thousands of cases.
//!
//! Each input is valid, as written by this library, and is then damaged. Either the reader refuses it with its own
//! error, or it returns the original. No case may panic, take seconds, use memory beyond its input's size, or return
//! anything else.

mod arenas;
mod harm;
mod memory;
mod messages;
mod records;

use harm::Draw;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Time limit of a case in seconds, thousands of times what it takes, which finds infinite loops.
const MAX_SECONDS: u64 = 20;

/// Outcome of a correct case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// It was refused.
    Refused,
    /// It was read, and equals the original.
    Same,
}

/// Runs the cases `0..cases` of a kind, and names a failing one.
fn run(kind: &'static str, cases: u64, mut case: impl FnMut(&mut Draw) -> Outcome) {
    let (begun, watched) = (Instant::now(), Watched::start(kind));
    let mut refused = 0;
    for number in 0..cases {
        watched.begin(number);
        let named = Named(kind, number);
        refused += u64::from(case(&mut Draw::new(kind, number)) == Outcome::Refused);
        drop(named);
    }
    let (seconds, peak) = (begun.elapsed().as_secs_f64(), memory::peak_of_cases());
    println!(
        "{kind}: {cases} cases, {refused} refused, the others the same; {seconds:.1} s, {peak} bytes at most"
    );
    assert!(refused > cases / 2, "{kind}: most damage matters");
}

/// Names the case that panics.
struct Named(&'static str, u64);

impl Drop for Named {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("case {} of {}", self.1, self.0);
        }
    }
}

/// Ends the process if a case takes too long.
struct Watched(Arc<(AtomicU64, AtomicBool)>);

impl Watched {
    fn start(kind: &'static str) -> Self {
        let shared = Arc::new((AtomicU64::new(0), AtomicBool::new(false)));
        let seen = shared.clone();
        thread::spawn(move || {
            let (mut last, mut since) = (0, Instant::now());
            while !seen.1.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_millis(100));
                let now = seen.0.load(Ordering::Relaxed);
                if now != last {
                    (last, since) = (now, Instant::now());
                } else if since.elapsed().as_secs() > MAX_SECONDS {
                    eprintln!("case {now} of {kind} has not come to an end in {MAX_SECONDS} s");
                    std::process::abort();
                }
            }
        });
        Self(shared)
    }

    fn begin(&self, case: u64) {
        self.0.0.store(case, Ordering::Relaxed);
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.0.1.store(true, Ordering::Relaxed);
    }
}

/// A test of a few hundred cases for each kind, and one of all.
macro_rules! kinds {
    ($($test:ident: $kind:literal, $cases:literal, $case:expr;)*) => {
        $(
            #[test]
            fn $test() {
                run($kind, $cases / 250, $case);
            }
        )*

        #[test]
        #[ignore = "takes minutes"]
        fn damage_of_every_kind_is_refused_or_does_not_matter_in_600_000_cases() {
            $(run($kind, $cases, $case);)*
        }
    };
}

kinds! {
    a_damaged_arena_shows_what_was_written: "arena", 150_000, arenas::damaged();
    an_arena_is_read_as_it_stands: "arena with its checksum", 50_000, arenas::sealed();
    a_damaged_record_is_refused: "record", 200_000, records::damaged();
    a_record_of_other_rules_does_no_harm: "record with its checksum", 50_000, records::sealed();
    steps_are_repeated_as_they_were_taken: "stream of records", 50_000, records::streams();
    a_damaged_message_with_a_seal_is_no_members: "message with a seal", 50_000, messages::sealed();
    a_message_is_read_as_it_stands: "message without a seal", 50_000, messages::open();
}
