package io.mongomedallion.storage;

import io.delta.storage.HadoopFileSystemLogStore;
import java.io.IOException;
import java.nio.channels.FileChannel;
import java.nio.file.Files;
import java.nio.file.StandardCopyOption;
import java.nio.file.StandardOpenOption;
import java.util.Iterator;
import java.util.UUID;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.Path;

/**
 * Delta's log on a local or shared POSIX file system with a compare-and-set: a commit is written aside and gets its
 * name by link(2), which fails where the name is taken. rename(2), which Delta's own store uses, replaces a rival's commit.
 */
public final class HardLinkLogStore extends HadoopFileSystemLogStore {
    public HardLinkLogStore(Configuration hadoopConf) {
        super(hadoopConf);
    }

    @Override
    public void write(Path path, Iterator<String> actions, Boolean overwrite, Configuration hadoopConf) throws IOException {
        java.nio.file.Path target = java.nio.file.Path.of(Path.getPathWithoutSchemeAndAuthority(path).toString());
        java.nio.file.Path aside = target.resolveSibling("." + target.getFileName() + "." + UUID.randomUUID() + ".tmp");
        if (!Files.isDirectory(target.getParent())) {
            throw new java.io.FileNotFoundException("No such file or directory: " + target.getParent());
        }
        try {
            try (FileChannel out = FileChannel.open(aside, StandardOpenOption.CREATE_NEW, StandardOpenOption.WRITE)) {
                java.nio.ByteBuffer content = java.nio.ByteBuffer.wrap(ConditionalPutLogStore.lines(actions));
                while (content.hasRemaining()) {
                    out.write(content);
                }
            }
            if (overwrite) {
                // Left by a writer with Delta's own store; it would not match what comes now.
                Files.deleteIfExists(target.resolveSibling("." + target.getFileName() + ".crc"));
                Files.move(aside, target, StandardCopyOption.ATOMIC_MOVE, StandardCopyOption.REPLACE_EXISTING);
            } else {
                Files.createLink(target, aside);
            }
        } catch (java.nio.file.FileAlreadyExistsException taken) {
            throw new java.nio.file.FileAlreadyExistsException(path.toString());
        } finally {
            Files.deleteIfExists(aside);
        }
    }

    @Override
    public Boolean isPartialWriteVisible(Path path, Configuration hadoopConf) {
        return true;
    }
}
