//! Collectives and messages among members: right for any sizes and order, and ended by a lost member.

use evermoe::mesh::{Bytes, COLLECTIVE, Listening, Mesh};
use proptest::prelude::*;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60);
/// Time limit of calls that must time out.
const SOON: Duration = Duration::from_millis(300);
const GATHER: u32 = COLLECTIVE + 1;

/// Runs a function on each of some connected members.
fn on_members<T: Send>(size: usize, run: impl Fn(usize, Mesh) -> T + Sync) -> Vec<T> {
    let listening: Vec<_> = (0..size).map(|_| Listening::open(None).unwrap()).collect();
    let names: Vec<_> = listening.iter().map(|each| format!("127.0.0.1:{}", each.name())).collect();
    thread::scope(|scope| {
        let start = |(rank, each): (usize, Listening)| {
            let (names, run) = (&names, &run);
            scope.spawn(move || run(rank, each.connect(rank, names, LIMIT).unwrap()))
        };
        let threads: Vec<_> = listening.into_iter().enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn memory(bytes: &mut [u8]) -> Bytes {
    Bytes { address: bytes.as_mut_ptr(), length: bytes.len() }
}

fn all_to_all(
    mesh: &Mesh,
    tag: u32,
    sends: &mut [Vec<u8>],
    lengths: &[usize],
    limit: Duration,
) -> Result<Vec<Vec<u8>>, String> {
    let mut found: Vec<_> = lengths.iter().map(|&length| vec![0; length]).collect();
    let sends: Vec<_> = sends.iter_mut().map(|each| memory(each)).collect();
    let receives: Vec<_> = found.iter_mut().map(|each| memory(each)).collect();
    // SAFETY: the vectors live until the call returns, and nothing else uses them.
    unsafe { mesh.all_to_all(tag, &sends, &receives, limit) }.map(|()| found)
}

fn send(mesh: &Mesh, tag: u32, to: usize, data: &str) -> Result<(), String> {
    let mut data = data.as_bytes().to_vec();
    // SAFETY: as above.
    unsafe { mesh.exchange(tag, &[(to, memory(&mut data))], &[], LIMIT) }
}

fn receive(mesh: &Mesh, tag: u32, from: usize, length: usize, limit: Duration) -> Result<String, String> {
    let mut data = vec![0; length];
    // SAFETY: as above.
    unsafe { mesh.exchange(tag, &[], &[(from, memory(&mut data))], limit) }?;
    Ok(String::from_utf8(data).unwrap())
}

/// What a member sends to another.
fn part(from: usize, to: usize, round: usize, length: usize) -> Vec<u8> {
    (0..length).map(|at| (from * 31 + to * 17 + round * 7 + at * 3) as u8).collect()
}

fn gather(mesh: &Mesh, size: usize) -> Result<Vec<Vec<u8>>, String> {
    all_to_all(mesh, GATHER, &mut vec![vec![1]; size], &vec![1; size], LIMIT)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Lengths are around those of buffers, of what the system takes at once, and 0.
    #[test]
    fn each_member_gets_what_the_others_send_it(
        size in 1_usize..6,
        rounds in proptest::collection::vec(
            prop_oneof![Just(0_usize), 1..64_usize, 16_360..16_400_usize, 100_000..3_000_000_usize], 1..5,
        ),
        seed in any::<usize>(),
    ) {
        let length = |round: usize, from: usize, to: usize| {
            let most = rounds[round];
            if (seed / 2 + 5 * from + 3 * to + round).is_multiple_of(3) { most / 2 } else { most }
        };
        on_members(size, |rank, mesh| {
            for round in 0..rounds.len() {
                let mut sends: Vec<_> =
                    (0..size).map(|to| part(rank, to, round, length(round, rank, to))).collect();
                let lengths: Vec<_> = (0..size).map(|from| length(round, from, rank)).collect();
                let found = all_to_all(&mesh, COLLECTIVE, &mut sends, &lengths, LIMIT).unwrap();
                for (from, found) in found.into_iter().enumerate() {
                    assert!(found == part(from, rank, round, lengths[from]), "round {round}: {from} → {rank}");
                }
            }
        });
    }
}

#[test]
fn messages_that_come_before_they_are_awaited_are_kept_by_tag_and_in_order() {
    let long = "long".repeat(50_000);
    on_members(2, |rank, mesh| {
        if rank == 0 {
            for (tag, text) in [(3, "three"), (4, "four"), (3, "again"), (5, &long)] {
                send(&mesh, tag, 1, text).unwrap();
            }
            gather(&mesh, 2).unwrap();
            mesh.post(7, b"posted", &[1]).unwrap();
            gather(&mesh, 2).unwrap();
        } else {
            assert_eq!(receive(&mesh, 5, 0, long.len(), LIMIT).unwrap(), long);
            assert_eq!(receive(&mesh, 4, 0, 4, LIMIT).unwrap(), "four");
            gather(&mesh, 2).unwrap();
            assert_eq!(receive(&mesh, 3, 0, 5, LIMIT).unwrap(), "three");
            gather(&mesh, 2).unwrap();
            assert_eq!(receive(&mesh, 3, 0, 5, LIMIT).unwrap(), "again");
            assert_eq!(receive(&mesh, 7, 0, 6, LIMIT).unwrap(), "posted");
        }
    });
}

#[test]
fn members_in_different_collectives_name_each_other_and_take_nothing() {
    for (tag, length) in [(COLLECTIVE, 8), (GATHER, 9)] {
        let found = on_members(3, |rank, mesh| {
            let (tag, length) = if rank == 2 { (tag, length) } else { (GATHER, 8) };
            all_to_all(&mesh, tag, &mut vec![vec![1; length]; 3], &[length; 3], SOON).unwrap_err()
        });
        assert!(found.iter().any(|each| each.contains("ranks [2] are in another collective")), "{found:?}");
        assert!(
            found.iter().any(|each| each.contains("ranks [0, 1] are in another collective")),
            "{found:?}"
        );
    }
}

#[test]
fn a_silent_member_is_named_and_the_others_learn_that_the_connections_are_closed() {
    let found = on_members(3, |rank, mesh| {
        if rank == 2 {
            // Until the others have given up: its own call then fails at once.
            thread::sleep(2 * SOON);
            return gather(&mesh, 3).unwrap_err();
        }
        let first = all_to_all(&mesh, GATHER, &mut vec![vec![1]; 3], &[1; 3], SOON).unwrap_err();
        assert_eq!(gather(&mesh, 3).unwrap_err(), first, "a later call");
        first
    });
    assert!(found[2].contains("has closed its connection"), "{found:?}");
    assert!(found[..2].iter().any(|each| each == "timed out: nothing from ranks [2] for 0.3 s"), "{found:?}");
}

#[test]
fn only_time_in_which_no_byte_moves_counts_as_silence() {
    let step = Duration::from_millis(2500);
    on_members(3, |rank, mesh| {
        if rank > 0 {
            thread::sleep(step * rank as u32);
            send(&mesh, 1, 0, "late").unwrap();
            receive(&mesh, 2, 0, 4, LIMIT).unwrap();
            return;
        }
        let (mut one, mut other) = ([0; 4], [0; 4]);
        let receives = [(1, memory(&mut one)), (2, memory(&mut other))];
        // SAFETY: as above.
        unsafe { mesh.exchange(1, &[], &receives, step * 8 / 5) }.unwrap();
        assert_eq!((&one, &other), (b"late", b"late"));
        for other in [1, 2] {
            send(&mesh, 2, other, "done").unwrap();
        }
    });
}

#[test]
fn closing_ends_the_waits_on_both_sides_from_another_thread() {
    let (sender, receiver) = channel();
    let receiver = std::sync::Mutex::new(receiver);
    on_members(2, |rank, mesh| {
        let began = Instant::now();
        if rank == 0 {
            thread::scope(|scope| {
                let waiting = scope.spawn(|| receive(&mesh, 9, 1, 4, LIMIT).unwrap_err());
                receiver.lock().unwrap().recv().unwrap();
                mesh.close();
                mesh.close();
                assert!(waiting.join().unwrap().contains("closed"));
            });
        } else {
            sender.send(()).unwrap();
            assert_eq!(receive(&mesh, 9, 0, 4, LIMIT).unwrap_err(), "rank 0 has closed its connection");
        }
        assert!(began.elapsed() < LIMIT / 2);
    });
}

#[test]
fn strangers_are_closed_and_keep_no_member_out() {
    let listening = [Listening::open(None).unwrap(), Listening::open(None).unwrap()];
    let names: Vec<_> = listening.iter().map(|each| format!("127.0.0.1:{}", each.name())).collect();
    let port = |name: &str| name.split('/').next().unwrap().to_owned();
    let mut silent: Vec<_> = (0..9).map(|_| TcpStream::connect(port(&names[0])).unwrap()).collect();
    silent[0].write_all(&[9]).unwrap();
    let mut guesses = TcpStream::connect(port(&names[0])).unwrap();
    guesses.write_all(&[9; 24]).unwrap();
    let [first, second] = listening;
    thread::scope(|scope| {
        let one = scope.spawn(|| first.connect(0, &names, LIMIT).unwrap());
        let other = scope.spawn(|| second.connect(1, &names, LIMIT).unwrap());
        let (one, other) = (one.join().unwrap(), other.join().unwrap());
        scope.spawn(move || send(&one, 1, 1, "here").unwrap());
        assert_eq!(receive(&other, 1, 0, 4, LIMIT).unwrap(), "here");
    });
    for stranger in silent.iter_mut().chain([&mut guesses]) {
        let mut rest = Vec::new();
        stranger.set_read_timeout(Some(LIMIT)).unwrap();
        let read = stranger.read_to_end(&mut rest);
        let is_open = read.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock);
        assert!(!is_open && rest.is_empty(), "still open, or told {rest:?}");
    }
}

#[test]
fn a_member_that_does_not_come_is_an_error_in_time() {
    let listening = [Listening::open(None).unwrap(), Listening::open(None).unwrap()];
    let names: Vec<_> = listening.iter().map(|each| format!("127.0.0.1:{}", each.name())).collect();
    let [first, second] = listening;
    let error = first.connect(0, &names, SOON).unwrap_err().to_string();
    assert!(error.starts_with("waiting for the connections of other members"), "{error}");
    let error = second.connect(1, &names, SOON).unwrap_err().to_string();
    assert!(error.starts_with("connecting to 127.0.0.1:"), "{error}");
    let wrong = Listening::open(None).unwrap().connect(1, &["nothing".into(), "x".into()], SOON);
    assert!(wrong.unwrap_err().to_string().contains("host:port/token"));
}
