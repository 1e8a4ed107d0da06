//! Messages between members: each arrives whole, in the order of its tag; who is gone or a stranger costs its own alone.

use evermoe::secret::Secret;
use evermoe::transport::{Links, Peers, Port, Transfer};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(20);
/// Time for what must not happen.
const MOMENT: Duration = Duration::from_millis(200);

/// Ports of some members, and their addresses.
fn ports(secrets: &[Option<&str>]) -> (Vec<Port>, Vec<String>) {
    let open = |secret: &Option<&str>| {
        let secret = secret.map(|text| Secret::new(text).unwrap());
        Port::open(Some("127.0.0.1".parse().unwrap()), secret.as_ref()).unwrap()
    };
    let ports: Vec<Port> = secrets.iter().map(open).collect();
    let addresses = ports.iter().map(|port| format!("127.0.0.1:{}", port.port())).collect();
    (ports, addresses)
}

fn begin(port: &Port, group: u64, rank: usize, addresses: &[String]) -> Links {
    Links::begin(port, Peers { group, rank, addresses: addresses.to_vec(), streams: 3, limit: LIMIT })
        .unwrap()
}

/// Members of one group, and their ports.
fn group(size: usize) -> (Vec<Port>, Vec<Links>) {
    let (ports, addresses) = ports(&vec![None; size]);
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

fn reason(transfer: &Transfer) -> String {
    transfer.wait(LIMIT).expect("it is over").expect_err("it has failed")
}

#[test]
fn long_messages_may_be_changed_as_soon_as_they_are_over() {
    let (_ports, links) = group(2);
    let mut room = vec![vec![0; 3 << 20]; 12];
    let come: Vec<Transfer> = room.iter_mut().map(|each| receive(&links[1], each, 0, 7)).collect();
    let mut data = vec![vec![0; 3 << 20]; 2];
    for number in (0..12u8).step_by(2) {
        let (first, second) = data.split_at_mut(1);
        first[0].fill(number + 1);
        second[0].fill(number + 2);
        let sent = [send(&links[0], &mut first[0], 1, 7), send(&links[0], &mut second[0], 1, 7)];
        assert!(sent.iter().all(|each| each.wait(LIMIT) == Some(Ok(3 << 20))));
    }
    assert!(come.iter().all(|each| each.wait(LIMIT) == Some(Ok(3 << 20))));
    for (number, each) in room.iter().enumerate() {
        assert!(each.iter().all(|&byte| usize::from(byte) == number + 1), "message {number}");
    }
}

#[test]
fn messages_of_a_tag_keep_their_order_whoever_is_first() {
    let (_ports, links) = group(2);
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

#[test]
fn a_message_that_nobody_expects_holds_up_no_other() {
    let (_ports, links) = group(2);
    let (mut large, mut small, mut room) = (vec![1; 8 << 20], [2], [0]);
    let unexpected = send(&links[0], &mut large, 1, 7);
    for _ in 0..10 {
        let sent = send(&links[0], &mut small, 1, 8);
        let come = receive(&links[1], &mut room, 0, 8);
        assert_eq!((sent.wait(LIMIT), come.wait(LIMIT)), (Some(Ok(1)), Some(Ok(1))));
    }
    assert_eq!((room, unexpected.wait(MOMENT)), ([2], None));
}

#[test]
fn a_lost_member_costs_its_own_messages_alone() {
    let (_ports, mut links) = group(3);
    let [mut to_lost, mut from_lost, mut kept, mut room] = [[1], [0], [3], [0]];
    let waits = [send(&links[0], &mut to_lost, 2, 1), receive(&links[0], &mut from_lost, 2, 1)];
    drop(links.pop());
    // It is asked, and answers no more; what goes to it fails with what comes from it.
    for transfer in &waits {
        assert_eq!(reason(transfer), "rank 2: it has closed its connections");
    }
    assert_eq!(reason(&send(&links[0], &mut to_lost, 2, 1)), "rank 2: it has closed its connections");
    let (sent, come) = (send(&links[0], &mut kept, 1, 1), receive(&links[1], &mut room, 0, 1));
    assert_eq!((sent.wait(LIMIT), come.wait(LIMIT), room), (Some(Ok(1)), Some(Ok(1)), [3]));
}

#[test]
fn ended_links_fail_everything_on_both_sides() {
    let (_ports, links) = group(2);
    let [mut data, mut room, mut late] = [[1], [0], [0]];
    let (sent, come) = (send(&links[0], &mut data, 1, 1), receive(&links[1], &mut room, 0, 2));
    links[0].end("enough");
    links[0].end("later");
    assert_eq!(reason(&sent), "enough");
    assert_eq!(reason(&come), "rank 0: it has closed its connections");
    assert_eq!(reason(&receive(&links[0], &mut late, 1, 1)), "enough");
}

#[test]
fn a_message_that_is_longer_than_its_room_is_an_error_on_both_sides() {
    let (_ports, links) = group(2);
    let (mut data, mut room) = ([7; 9], [0; 8]);
    let (sent, come) = (send(&links[0], &mut data, 1, 5), receive(&links[1], &mut room, 0, 5));
    assert_eq!(reason(&sent), "rank 1: a message of 9 bytes with tag 5: rank 1 expects 8 at most");
    assert_eq!(reason(&come), "rank 0: it has closed its connections");
    assert_eq!(room, [0; 8]);
}

#[test]
fn memory_is_given_back_half_way() {
    let (_ports, links) = group(2);
    let mut data = vec![1; 64 << 20];
    let mut room = vec![0; 64 << 20];
    let (sent, come) = (send(&links[0], &mut data, 1, 5), receive(&links[1], &mut room, 0, 5));
    drop(come);
    let before = room.clone();
    reason(&sent);
    assert_eq!(room, before, "somebody still writes");
}

#[test]
fn connections_come_before_the_group_and_not_after_it() {
    let (ports, addresses) = ports(&[None, None]);
    let quick = begin(&ports[0], 8, 0, &addresses);
    let slow = begin(&ports[1], 7, 1, &addresses);
    let (mut data, mut room, mut old) = ([4], [0], [0]);
    let come = receive(&quick, &mut room, 1, 1);
    assert_eq!(come.wait(MOMENT), None);
    // Rank 1's group 7 is over; it waits for nobody there.
    let forgotten = receive(&slow, &mut old, 0, 1);
    assert_eq!(forgotten.wait(MOMENT), None);
    drop(slow);
    let now = begin(&ports[1], 8, 1, &addresses);
    let sent = send(&now, &mut data, 0, 1);
    assert_eq!((sent.wait(LIMIT), come.wait(LIMIT), room), (Some(Ok(1)), Some(Ok(1)), [4]));
}

#[test]
fn a_member_without_the_secret_gets_nothing() {
    let right = "correct horse battery";
    for wrong in [None, Some("another secret of a job")] {
        let (ports, addresses) = ports(&[Some(right), wrong, Some(right)]);
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

#[test]
fn strangers_are_closed() {
    let (ports, addresses) = ports(&[None, None]);
    let links: Vec<Links> = (0..2).map(|rank| begin(&ports[rank], 1, rank, &addresses)).collect();
    let hello = |rank: u64| [*b"evermoe1", 1u64.to_le_bytes(), rank.to_le_bytes(), [0; 8]].concat();
    for (what, bytes, answer) in [
        ("no member", vec![b'G'; 32], 0),
        ("a rank that is none", hello(2), 8),
        ("the member's own rank", hello(0), 8),
        ("a rank beyond all", hello(u64::MAX), 8),
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

#[test]
fn wrong_ranks_are_refused() {
    let (_ports, links) = group(2);
    let mut data = [0];
    for peer in [0, 2] {
        // SAFETY: nothing begins.
        let error = unsafe { links[0].send(data.as_mut_ptr(), 1, peer, 1) }.unwrap_err();
        assert_eq!(error.to_string(), format!("peer: expected a rank below 2 that is not 0, got {peer}"));
    }
    let (ports, addresses) = ports(&[None]);
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
