//! Messages between members: each arrives complete, in the order of its tag; a lost member or a stranger affects only
//! its own.

use evermoe::secret::Secret;
use evermoe::transport::{Carrier, Links, Peers, Port, Transfer};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(20);
/// Time to wait for events that must not happen.
const MOMENT: Duration = Duration::from_millis(200);

/// Tests with both carriers. UCX is skipped without a library, unless `EVERMOE_UCX` names one.
macro_rules! on_both {
    ($($(#[$meta:meta])* fn $name:ident($carrier:ident: &Carrier) $body:block)*) => {
        mod tcp {
            $(#[test] fn $name() { super::$name(&super::Carrier::Tcp); })*
        }
        mod ucx {
            $(#[test] fn $name() {
                if let Some(carrier) = super::ucx_carrier() {
                    super::$name(&carrier);
                }
            })*
        }
        $($(#[$meta])* fn $name($carrier: &Carrier) $body)*
    };
}

fn ucx_carrier() -> Option<Carrier> {
    let named = std::env::var("EVERMOE_UCX").ok();
    let carrier = Carrier::Ucx { libraries: vec![named.clone().unwrap_or("libucp.so.0".into())] };
    match Port::open(&[], None, &carrier) {
        Ok(_) => Some(carrier),
        Err(error) if named.is_some() => panic!("{error}"),
        Err(error) => {
            eprintln!("passed over: {error}");
            None
        }
    }
}

/// Ports of some members, and their addresses.
fn ports(carrier: &Carrier, secrets: &[Option<&str>]) -> (Vec<Port>, Vec<String>) {
    let open = |secret: &Option<&str>| {
        let secret = secret.map(|text| Secret::new(text).unwrap());
        Port::open(&["127.0.0.1".parse().unwrap()], secret.as_ref(), carrier).unwrap()
    };
    let ports: Vec<Port> = secrets.iter().map(open).collect();
    let addresses = ports.iter().map(|port| format!("127.0.0.1:{}", port.ports()[0])).collect();
    (ports, addresses)
}

fn begin(port: &Port, group: u64, rank: usize, addresses: &[String]) -> Links {
    Links::begin(port, Peers { group, rank, addresses: addresses.to_vec(), streams: 3, limit: LIMIT })
        .unwrap()
}

/// Members of one group, and their ports.
fn group(carrier: &Carrier, size: usize) -> (Vec<Port>, Vec<Links>) {
    let (ports, addresses) = ports(carrier, &vec![None; size]);
    let links = ports.iter().enumerate().map(|(rank, port)| begin(port, 1, rank, &addresses)).collect();
    (ports, links)
}

fn send(links: &Links, data: &mut [u8], peer: usize, tag: u64) -> Transfer {
    // SAFETY: the tests keep all memory until their transfers are over or dropped, and leave it as it is.
    unsafe { links.send(data.as_mut_ptr(), data.len(), peer, tag) }.unwrap()
}

fn receive(links: &Links, room: &mut [u8], peer: usize, tag: u64) -> Transfer {
    // SAFETY: as in `send`.
    unsafe { links.receive(room.as_mut_ptr(), room.len(), peer, tag) }.unwrap()
}

/// Number of connections to a port of this machine, from the kernel's table.
fn connections(address: Ipv4Addr, port: u16) -> usize {
    const ESTABLISHED: &str = "01";
    let remote = format!("{:08X}:{port:04X}", u32::from_ne_bytes(address.octets()));
    let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let rows = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    rows.filter(|row| row[2] == remote && row[3] == ESTABLISHED).count()
}

fn reason(transfer: &Transfer) -> String {
    transfer.wait(LIMIT).expect("it is over").expect_err("it has failed")
}

on_both! {
fn long_messages_may_be_changed_as_soon_as_they_are_over(carrier: &Carrier) {
    let (_ports, links) = group(carrier, 2);
    let mut room = vec![vec![0; 3 << 20]; 12];
    let come: Vec<Transfer> = room.iter_mut().map(|each| receive(&links[1], each, 0, 7)).collect();
    let mut data = vec![vec![0; 3 << 20]; 2];
    for number in (0..12u8).step_by(2) {
        let (first, second) = data.split_at_mut(1);
        first[0].fill(number + 1);
        second[0].fill(number + 2);
        let sent = [send(&links[0], &mut first[0], 1, 7), send(&links[0], &mut second[0], 1, 7)];
        for each in &sent {
            assert_eq!(each.wait(LIMIT), Some(Ok(3 << 20)));
        }
    }
    assert!(come.iter().all(|each| each.wait(LIMIT) == Some(Ok(3 << 20))));
    for (number, each) in room.iter().enumerate() {
        assert!(each.iter().all(|&byte| usize::from(byte) == number + 1), "message {number}");
    }
}

fn messages_of_a_tag_keep_their_order_whoever_is_first(carrier: &Carrier) {
    let (_ports, links) = group(carrier, 2);
    let mut data: Vec<Vec<u8>> = (0..40u8).map(|each| vec![each; 1 + 1000 * usize::from(each)]).collect();
    let mut room = vec![vec![255; 40_000]; 40];
    let (mut sent, mut come) = (Vec::new(), Vec::new());
    // Ten are expected before they are sent, the others after; two tags by turns.
    for (place, each) in room[..10].iter_mut().enumerate() {
        come.push(receive(&links[1], each, 0, place as u64 % 2));
    }
    for (place, each) in data.iter_mut().enumerate() {
        sent.push(send(&links[0], each, 1, place as u64 % 2));
    }
    for (place, each) in room[10..].iter_mut().enumerate() {
        come.push(receive(&links[1], each, 0, place as u64 % 2));
    }
    let lengths: Vec<usize> = data.iter().map(Vec::len).collect();
    for (transfers, what) in [(&sent, "sent"), (&come, "come")] {
        let found: Vec<_> = transfers.iter().map(|each| each.wait(LIMIT).unwrap().unwrap()).collect();
        assert_eq!(found, lengths, "{what}");
    }
    for (place, (data, room)) in data.iter().zip(&room).enumerate() {
        assert_eq!(&room[..data.len()], data, "message {place}");
        assert!(room[data.len()..].iter().all(|&byte| byte == 255), "message {place} is longer than it was");
    }
}

fn connections_take_turns_among_the_cards_of_a_member(carrier: &Carrier) {
    let cards: Vec<Ipv4Addr> = (1..=3).map(|number| Ipv4Addr::new(127, 0, 0, number)).collect();
    let listen = |cards: &[Ipv4Addr]| {
        let cards: Vec<IpAddr> = cards.iter().copied().map(IpAddr::V4).collect();
        Port::open(&cards, None, carrier).unwrap()
    };
    let ports = [listen(&cards), listen(&cards[..1])];
    let named = |port: &Port| cards.iter().zip(port.ports()).map(|(card, port)| format!("{card}:{port}"));
    let mut addresses = ports.each_ref().map(|port| named(port).collect::<Vec<_>>().join(",")).to_vec();
    let closed = TcpListener::bind("127.0.0.9:0").unwrap().local_addr().unwrap();
    addresses[1] = format!("{closed},{}", addresses[1]);
    let links = [begin(&ports[0], 1, 0, &addresses), begin(&ports[1], 1, 1, &addresses)];
    for _ in 0..6 {
        let [mut data, mut room, mut back, mut last] = [[5], [0], [6], [0]];
        let transfers = [
            send(&links[0], &mut data, 1, 7),
            receive(&links[1], &mut room, 0, 7),
            send(&links[1], &mut back, 0, 7),
            receive(&links[0], &mut last, 1, 7), // also where the first address refuses
        ];
        assert!(transfers.iter().all(|each| each.wait(LIMIT) == Some(Ok(1))));
        assert_eq!((room, last), ([5], [6]));
    }
    let found: Vec<usize> = cards.iter().zip(ports[0].ports()).map(|(&card, port)| connections(card, port)).collect();
    assert_eq!(found, [1, 1, 1]);
    assert_eq!(connections(cards[0], ports[1].ports()[0]), 3);
}

fn a_message_that_nobody_expects_holds_up_no_other(carrier: &Carrier) {
    let (_ports, links) = group(carrier, 2);
    let (mut large, mut small, mut room) = (vec![1; 8 << 20], [2], [0]);
    let unexpected = send(&links[0], &mut large, 1, 7);
    for _ in 0..10 {
        let sent = send(&links[0], &mut small, 1, 8);
        let come = receive(&links[1], &mut room, 0, 8);
        assert_eq!((sent.wait(LIMIT), come.wait(LIMIT)), (Some(Ok(1)), Some(Ok(1))));
    }
    assert_eq!((room, unexpected.wait(MOMENT)), ([2], None));
}

fn a_lost_member_costs_its_own_messages_alone(carrier: &Carrier) {
    let (_ports, mut links) = group(carrier, 3);
    let [mut to_lost, mut from_lost, mut kept, mut room] = [[1], [0], [3], [0]];
    let waits = [send(&links[0], &mut to_lost, 2, 1), receive(&links[0], &mut from_lost, 2, 1)];
    drop(links.pop());
    // It is asked, and no longer answers; messages to it fail together with those from it.
    for transfer in &waits {
        assert_eq!(reason(transfer), "rank 2: it has closed its connections");
    }
    assert_eq!(reason(&send(&links[0], &mut to_lost, 2, 1)), "rank 2: it has closed its connections");
    let (sent, come) = (send(&links[0], &mut kept, 1, 1), receive(&links[1], &mut room, 0, 1));
    assert_eq!((sent.wait(LIMIT), come.wait(LIMIT), room), (Some(Ok(1)), Some(Ok(1)), [3]));
}

fn ended_links_fail_everything_on_both_sides(carrier: &Carrier) {
    let (_ports, links) = group(carrier, 2);
    let [mut data, mut room, mut late] = [[1], [0], [0]];
    let (sent, come) = (send(&links[0], &mut data, 1, 1), receive(&links[1], &mut room, 0, 2));
    links[0].end("enough");
    links[0].end("later");
    assert_eq!(reason(&sent), "enough");
    assert_eq!(reason(&come), "rank 0: it has closed its connections");
    assert_eq!(reason(&receive(&links[0], &mut late, 1, 1)), "enough");
}

fn a_message_that_is_longer_than_its_room_is_an_error_on_both_sides(carrier: &Carrier) {
    let (_ports, links) = group(carrier, 2);
    let (mut data, mut room) = ([7; 9], [0; 8]);
    let (sent, come) = (send(&links[0], &mut data, 1, 5), receive(&links[1], &mut room, 0, 5));
    assert_eq!(reason(&sent), "rank 1: a message of 9 bytes with tag 5: rank 1 expects at most 8");
    assert_eq!(reason(&come), "rank 0: it has closed its connections");
    assert_eq!(room, [0; 8]);
}

fn memory_is_given_back_half_way(carrier: &Carrier) {
    let (_ports, links) = group(carrier, 2);
    let mut data = vec![1; 64 << 20];
    let mut room = vec![0; 64 << 20];
    let (sent, come) = (send(&links[0], &mut data, 1, 5), receive(&links[1], &mut room, 0, 5));
    drop(come);
    let before = room.clone();
    reason(&sent);
    assert_eq!(room, before, "somebody still writes");
}

fn connections_come_before_the_group_and_not_after_it(carrier: &Carrier) {
    let (ports, addresses) = ports(carrier, &[None, None]);
    let quick = begin(&ports[0], 8, 0, &addresses);
    let slow = begin(&ports[1], 7, 1, &addresses);
    let (mut data, mut room, mut old) = ([4], [0], [0]);
    let come = receive(&quick, &mut room, 1, 1);
    assert_eq!(come.wait(MOMENT), None);
    // Rank 1's group 7 is over; this message waits for no one in it.
    let forgotten = receive(&slow, &mut old, 0, 1);
    assert_eq!(forgotten.wait(MOMENT), None);
    drop(slow);
    let now = begin(&ports[1], 8, 1, &addresses);
    let sent = send(&now, &mut data, 0, 1);
    assert_eq!((sent.wait(LIMIT), come.wait(LIMIT), room), (Some(Ok(1)), Some(Ok(1)), [4]));
}

fn a_member_without_the_secret_gets_nothing(carrier: &Carrier) {
    let right = "correct horse battery";
    for wrong in [None, Some("another secret of a job")] {
        let (ports, addresses) = ports(carrier, &[Some(right), wrong, Some(right)]);
        let links: Vec<Links> =
            ports.iter().enumerate().map(|(rank, port)| begin(port, 1, rank, &addresses)).collect();
        let [mut data, mut same, mut room, mut kept] = [[9], [9], [0], [0]];
        let sent = send(&links[0], &mut data, 1, 1);
        let come = receive(&links[1], &mut room, 0, 1);
        assert!(reason(&come).starts_with("rank 0: "), "{wrong:?}");
        assert_eq!((sent.wait(MOMENT), room), (None, [0]));
        let (sent, come) = (send(&links[0], &mut same, 2, 1), receive(&links[2], &mut kept, 0, 1));
        assert_eq!((sent.wait(LIMIT), come.wait(LIMIT), kept), (Some(Ok(1)), Some(Ok(1)), [9]));
    }
}

fn strangers_are_closed(carrier: &Carrier) {
    let (ports, addresses) = ports(carrier, &[None, None]);
    let links: Vec<Links> = (0..2).map(|rank| begin(&ports[rank], 1, rank, &addresses)).collect();
    let by_ucx = u64::from(matches!(carrier, Carrier::Ucx { .. }));
    let hello = |rank: u64| {
        [*b"evermoe2", 1u64.to_le_bytes(), rank.to_le_bytes(), by_ucx.to_le_bytes(), [0; 8]].concat()
    };
    for (what, bytes, answer) in [
        ("no member", vec![b'G'; 40], 0),
        ("a rank that is none", hello(2), 16),
        ("the member's own rank", hello(0), 16),
        ("a rank beyond all", hello(u64::MAX), 16),
    ] {
        let mut stranger = TcpStream::connect(&addresses[0]).unwrap();
        stranger.set_read_timeout(Some(LIMIT)).unwrap();
        stranger.write_all(&bytes).unwrap();
        let mut found = Vec::new();
        stranger.read_to_end(&mut found).unwrap();
        assert_eq!(found.len(), answer, "{what}");
    }
    let (mut data, mut room) = ([4], [0]);
    let (sent, come) = (send(&links[0], &mut data, 1, 1), receive(&links[1], &mut room, 0, 1));
    assert_eq!((sent.wait(LIMIT), come.wait(LIMIT), room), (Some(Ok(1)), Some(Ok(1)), [4]));
}

fn wrong_ranks_are_refused(carrier: &Carrier) {
    let (_ports, links) = group(carrier, 2);
    let mut data = [0];
    for peer in [0, 2] {
        // SAFETY: nothing begins.
        let error = unsafe { links[0].send(data.as_mut_ptr(), 1, peer, 1) }.unwrap_err();
        assert_eq!(error.to_string(), format!("peer: expected a rank below 2 that is not 0, got {peer}"));
    }
    let (ports, addresses) = ports(carrier, &[None]);
    for (rank, streams) in [(1, 1), (0, 0)] {
        let peers = Peers { group: 1, rank, addresses: addresses.clone(), streams, limit: LIMIT };
        assert!(
            Links::begin(&ports[0], peers)
                .unwrap_err()
                .to_string()
                .starts_with("Links: expected a rank below 1")
        );
    }
}

fn a_member_that_is_killed_half_way_fails_its_message_and_nobody_touches_the_memory(carrier: &Carrier) {
    for sends in [true, false] {
        // On a busy machine all bytes may have arrived before the kill: then try once more.
        assert!((0..5).any(|_| is_killed_half_way(carrier, sends)), "sends: {sends}");
    }
}

fn a_member_may_give_up_at_any_moment(carrier: &Carrier) {
    for round in 0..40 {
        let (_ports, links) = group(carrier, 2);
        let (mut data, mut room) = (vec![1; 4 << 20], vec![0; 4 << 20]);
        let sent = send(&links[0], &mut data, 1, 5);
        let come = receive(&links[1], &mut room, 0, 5);
        thread::sleep(Duration::from_micros(200 * round));
        drop(come);
        links[1].end("enough");
        let before = room.clone();
        // It may have sent everything before it notices.
        sent.wait(LIMIT).expect("it is over").unwrap_or_default();
        assert!(room == before, "somebody still writes");
    }
}

fn members_that_move_bytes_in_other_ways_say_so(carrier: &Carrier) {
    let Some(ucx) = ucx_carrier() else { return };
    let other = if matches!(carrier, Carrier::Tcp) { &ucx } else { &Carrier::Tcp };
    let all = [carrier, other].map(|carrier| ports(carrier, &[None]));
    let addresses: Vec<String> = all.iter().flat_map(|(_, addresses)| addresses.clone()).collect();
    let links = [0, 1].map(|rank| begin(&all[rank].0[0], 1, rank, &addresses));
    let (mut data, mut room) = ([4], [0]);
    let (sent, come) = (send(&links[0], &mut data, 1, 1), receive(&links[1], &mut room, 0, 1));
    let (sent, come) = (reason(&sent), reason(&come));
    assert!(sent.starts_with("rank 1: its transport is ") && sent.contains("expected the same"), "{sent}");
    assert!(come.starts_with("rank 0: its transport is ") && come.contains("expected the same"), "{come}");
}
}

/// Bytes of a message that takes long enough to be in the middle of it.
const HALF_WAY_BYTES: usize = 256 << 20;

/// Kills the other member in the middle of a message, and checks the rest; false if it was too late for that.
fn is_killed_half_way(carrier: &Carrier, sends: bool) -> bool {
    let (ports, mut addresses) = ports(carrier, &[None]);
    let (mut other, address) = start_member(carrier, &addresses[0], !sends);
    addresses.push(address);
    let links = begin(&ports[0], 1, 0, &addresses);
    let mut memory = vec![u8::from(sends); HALF_WAY_BYTES];
    let transfer = if sends { send(&links, &mut memory, 1, 5) } else { receive(&links, &mut memory, 1, 5) };
    if !sends {
        wait_for_bytes(memory.as_ptr());
        other.kill().unwrap();
    }
    let ended = other.wait().unwrap();
    let start = Instant::now();
    let result = transfer.wait(LIMIT).expect("it is over");
    assert!(start.elapsed() < LIMIT / 4 && !ended.success(), "{ended:?}");
    let before = memory.clone();
    thread::sleep(MOMENT);
    assert!(memory == before, "somebody still writes");
    result.is_err()
}

/// Starts `member_of_another_process`, with rank 1; returns its address, too.
fn start_member(carrier: &Carrier, address: &str, sends: bool) -> (Child, String) {
    let carrier = if matches!(carrier, Carrier::Tcp) { "tcp" } else { "ucx" };
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "member_of_another_process", "--nocapture"])
        .envs([("MEMBER_CARRIER", carrier), ("MEMBER_OF", address), ("MEMBER_SENDS", &sends.to_string())])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let said = lines.map(Result::unwrap).find_map(|line| line.split("address ").nth(1).map(str::to_owned));
    (child, said.unwrap())
}

/// Not a test of its own: see `start_member`. The receiver ends in the middle of the message.
#[test]
fn member_of_another_process() {
    let Ok(first) = std::env::var("MEMBER_OF") else { return };
    let is_tcp = std::env::var("MEMBER_CARRIER").unwrap() == "tcp";
    let (ports, own) = ports(&if is_tcp { Carrier::Tcp } else { ucx_carrier().unwrap() }, &[None]);
    let links = begin(&ports[0], 1, 1, &[first, own[0].clone()]);
    println!("address {}", own[0]);
    let sends = std::env::var("MEMBER_SENDS").unwrap() == "true";
    let mut memory = vec![u8::from(sends); HALF_WAY_BYTES];
    if sends {
        let _sent = send(&links, &mut memory, 0, 5).wait(LIMIT);
        thread::sleep(LIMIT); // until it is killed
    }
    let _come = receive(&links, &mut memory, 0, 5);
    wait_for_bytes(memory.as_ptr());
    // SAFETY: it ends this process.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
}

/// Waits until some bytes of a message of ones have arrived.
fn wait_for_bytes(room: *const u8) {
    let deadline = Instant::now() + LIMIT;
    // SAFETY: within the room, whose bytes another thread writes: any value may be read.
    while !(0..HALF_WAY_BYTES).step_by(1 << 20).any(|at| unsafe { room.add(at).read_volatile() } != 0) {
        assert!(Instant::now() < deadline, "nothing has come");
    }
}

#[cfg(not(feature = "ucx"))]
#[test]
fn a_build_without_ucx_says_so() {
    let error = Port::open(&[], None, &Carrier::Ucx { libraries: Vec::new() }).unwrap_err();
    assert!(
        error.to_string().starts_with("transport: \"ucx\" needs a build with the feature `ucx`"),
        "{error}"
    );
}
